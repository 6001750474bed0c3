"""Which part of a model goes to which device, to host memory or to disk: decided by sizes, before anything moves."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "placement": ["assign_placements", "main_device_of", "TensorPlacement"],
        },
    )
