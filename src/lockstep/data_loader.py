"""Names that scripts import from ``accelerate.data_loader``."""

from __future__ import annotations

from torch.utils.data import BatchSampler

from lockstep.data.drawn import SeedableRandomSampler
from lockstep.data.loader import PreparedLoader
from lockstep.data.prepare import prepare_data_loader
from lockstep.data.skip import LaterItems, skip_first_batches

__all__ = [
    "PreparedLoader",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "prepare_data_loader",
    "skip_first_batches",
]


class SkipBatchSampler(LaterItems):
    """A sampler of batches without its first batches.

    Args:
        batch_sampler: The sampler of batches.
        skip_batches: The number of batches that are left out at the beginning of each iteration.

    Examples:
        ```python
        from torch.utils.data import BatchSampler, SequentialSampler
        from lockstep.data_loader import SkipBatchSampler

        batches = BatchSampler(SequentialSampler(range(6)), batch_size=2, drop_last=False)
        assert list(SkipBatchSampler(batches, skip_batches=2)) == [[4, 5]]
        ```
    """

    def __init__(self, batch_sampler: BatchSampler, skip_batches: int = 0) -> None:
        super().__init__(batch_sampler, skip_batches)
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    @property
    def total_length(self) -> int:
        """The number of batches of the sampler inside, with those that are left out."""
        return len(self.batch_sampler)
