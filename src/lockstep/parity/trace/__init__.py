"""The tensors of a run: their names, a file of them, and how far another run's are from it."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "file": ["Trace"],
            "items": ["ItemKind", "TraceItem"],
            "measure": ["as_pairs", "as_regions", "Measured", "read_measured"],
            "regions": ["region", "ShardAxes"],
            "sinks": ["Recording", "TraceComparison"],
        },
    )
