from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "methods": ["build_profiler"],
            "run_observer": ["ObservedRun", "RunObserver"],
            "state_bytes": ["count_state", "StateBytes"],
        },
    )
