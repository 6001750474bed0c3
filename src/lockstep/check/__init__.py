"""Whether a split model computes what the whole one does: both run on the same batch, and are compared."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "compare": ["RoundingLimits", "compare_with_whole"],
            "observe": ["Observations", "Observed", "observed"],
            "passes": ["ComparedBatch", "PassResult", "run_pass"],
            "reference": ["Reference", "SplitModelState"],
            "rounding": ["FEW", "LARGE", "MULTIPLE", "Rounding", "disturbed"],
            "snapshot": ["numbers", "Snapshot"],
        },
    )
