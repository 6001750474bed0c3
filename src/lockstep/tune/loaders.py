"""A loader over the same data in the same order, in batches of another size."""

from __future__ import annotations

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lockstep.comm.tree import Kwargs
from lockstep.data.skip import carried_options
from lockstep.errors import UsageError


def with_batch_size(loader: DataLoader[object], size: int) -> DataLoader[object]:
    """Return ``loader`` with batches of ``size`` samples; of its sampler, dataset and options nothing is copied.

    Raises:
        UsageError: something of the script's own makes the batches.
    """
    refuse_own_batches(loader)
    options: Kwargs = {**carried_options(loader), "collate_fn": loader.collate_fn}
    if not isinstance(loader.dataset, IterableDataset):
        options["sampler"] = loader.sampler
    return type(loader)(loader.dataset, batch_size=size, drop_last=loader.drop_last, **options)


def refuse_own_batches(loader: DataLoader[object]) -> None:
    """Raise UsageError where not torch makes the batches of a loader, by a size."""
    if loader.batch_size is None and loader.batch_sampler is None:
        what = f"its dataset, a {type(loader.dataset).__name__}"
    elif loader.batch_size is None or (
        not isinstance(loader.dataset, IterableDataset) and type(loader.batch_sampler) is not BatchSampler
    ):
        what = f"a {type(loader.batch_sampler).__name__}"
    elif type(loader).__module__.partition(".")[0] not in ("torch", "torchdata"):
        what = f"a {type(loader).__name__}"
    else:
        return
    raise UsageError(
        f"The batches of the training loader are made by {what}, so their size cannot be changed from outside. "
        "Use a torch DataLoader with batch_size=..."
    )
