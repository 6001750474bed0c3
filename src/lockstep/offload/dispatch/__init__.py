"""A model placed by a device map: its weights loaded, offloaded and streamed."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "attach": ["cross_devices"],
            "loading": ["load_checkpoint_in_model"],
        },
    )
