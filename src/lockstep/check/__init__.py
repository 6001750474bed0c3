"""Whether a split model computes what the whole one does: both run on the same batch, and are compared."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "compare": ["compare_with_whole", "tolerance_of"],
            "observe": ["Observations", "Observed", "observed"],
            "passes": ["ComparedBatch", "PassResult", "run_pass"],
            "reference": ["Reference"],
            "snapshot": ["numbers", "Snapshot"],
        },
    )
