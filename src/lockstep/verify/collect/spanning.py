"""What one process cannot compute for several ranks: it has their batches only one after another, and one model."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lockstep.parallel.expert.layer import layers
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.sync_batchnorm import BATCH_NORMS

Refuse = Callable[..., object]
"""Ends the run with a sentence on why, and ``instead``, one on what to do."""
ONE_AFTER_ANOTHER = "which one process has only one after another"
GATHERED = (
    f"The script's loss is that of the batches of all ranks together (gather_for_loss), {ONE_AFTER_ANOTHER}."
)
ALONE = (
    "The ranks take steps of their own (LocalSGD, DiLoCo or BoundedStaleness), which one process does not: it has the "
    "gradients of all ranks in each step."
)
SYNCHRONISED = 'Compare with several processes instead: --reference "ddp sync_batchnorm".'


def refuse_synchronised_statistics(model: ParallelModel, synchronises: bool, refuse: Refuse) -> None:
    """Refuse batch normalisation over all ranks. ``synchronises``: the candidate makes it of each."""
    for name, module in model.plain.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            refuse(
                f"`{name}` is a SyncBatchNorm: it takes its statistics over the batches of all ranks, "
                f"{ONE_AFTER_ANOTHER}."
            )
        elif synchronises and isinstance(module, BATCH_NORMS):
            refuse(
                f"With sync_batchnorm `{name}` takes its statistics over the batches of all ranks, "
                f"{ONE_AFTER_ANOTHER}.",
                instead=SYNCHRONISED,
            )


def refuse_shared_routing(model: ParallelModel, refuse: Refuse) -> None:
    """Refuse a mixture of experts, whose capacities and losses are those of all ranks together."""
    for name, _ in layers(model.plain):
        refuse(
            f"`{name}` is a MixtureOfExperts: the losses of its router, and which tokens fit its experts' capacity, "
            f"depend on the batches of all ranks together, {ONE_AFTER_ANOTHER}."
        )
