"""Whether two runs agree: how far rounding explains what they have, and what a difference looks like."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "decide": ["judge", "judge_repeat"],
            "tolerance": ["Tolerance", "tolerance_of"],
            "verdict": ["Fault", "Mismatch", "ParityVerdict", "Ratio", "RunFacts"],
        },
    )
