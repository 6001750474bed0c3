"""What is read from a user's modules: their blocks, what they hold, which of them are equal."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "blocks": ["find_blocks", "shared_parameters"],
            "changes": ["disable_cache"],
            "dtypes": ["DTYPES"],
        },
    )
