"""Models, gradients and optimizer states that do not fit into the memory of the device."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "activations": ["beside_accelerator", "HostActivations"],
            "copies": [
                "Copies",
                "copies_of",
                "dense_strides",
                "HostPool",
                "SideStream",
                "Staging",
                "view_of",
            ],
        },
    )
