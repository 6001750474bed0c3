"""What one process cannot compute for several ranks: it has their batches only one after another, and one model."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from lockstep.model.changes import UncopiedHook
from lockstep.parallel.expert.layer import MixtureOfExperts, layers
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
    """Refuse experts' capacities, and as soon as a loss with them is differentiated their losses."""
    for name, layer in layers(model.plain):
        if layer.capacity_factor is not None:
            refuse(
                f"`{name}` is a MixtureOfExperts with capacity_factor={layer.capacity_factor:g}: which tokens its "
                f"experts take depends on the batches of all ranks together, {ONE_AFTER_ANOTHER}."
            )
        layer.register_forward_hook(_AfterRouting(name, refuse))


class _AfterRouting(UncopiedHook):
    """A forward hook of a mixture of experts, that has its losses tell when they are differentiated."""

    def __init__(self, name: str, refuse: Refuse) -> None:
        self._name = name
        self._refuse = refuse

    def __call__(self, module: MixtureOfExperts, args: object, output: object) -> None:
        of_loss = {"load-balance loss": module.load.balance_loss, "z-loss": module.load.z_loss}
        for which, loss in of_loss.items():
            if loss.requires_grad:
                loss.register_hook(_OnLoss(f"the {which} of `{self._name}`", self._refuse))


class _OnLoss:
    """A hook of such a loss: its gradient comes."""

    def __init__(self, what: str, refuse: Refuse) -> None:
        self._what = what
        self._refuse = refuse

    def __call__(self, gradient: Tensor) -> None:
        if bool(gradient.any()):
            self._refuse(
                f"The script trains with {self._what}, which is that of the batches of all ranks together, "
                f"{ONE_AFTER_ANOTHER}."
            )
