"""Context parallelism: each rank holds a part of every sequence; attention alone needs the others'.

``layout`` says who holds which positions; ``ring`` and ``ulysses`` are the two attentions; ``region`` splits
and gathers around the blocks; ``apply`` puts it into a model; ``split`` is for callers who split themselves.
"""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules
from lockstep.parallel.context.apply import context_parallel
from lockstep.parallel.context.region import regions_of
from lockstep.parallel.context.split import gather_sequence, split_sequence

__all__ = ["context_parallel", "gather_sequence", "regions_of", "split_sequence"]

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "arguments": ["sequence_dim"],
            "layout": ["SequenceLayout"],
            "ring": ["CpuFlash", "Plain", "ring_attention"],
            "ulysses": ["ulysses_attention"],
        },
    )
