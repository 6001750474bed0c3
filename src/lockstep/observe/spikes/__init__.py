"""Steps whose loss or gradient norm jumps: all ranks leave them out, or stop before them."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "history": ["RecentValues"],
            "watch": ["check_form"],
        },
    )
