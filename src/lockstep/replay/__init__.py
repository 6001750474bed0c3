"""One bad step again, in one process: which module was the first to go wrong."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "run": ["ReplayedRun", "ReplaySpec"],
            "verdict": ["ReplayVerdict"],
            "worker": ["run_replay"],
        },
    )
