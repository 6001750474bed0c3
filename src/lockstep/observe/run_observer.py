"""What looks on while a run trains: told of what is prepared, and of each part of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from lockstep.config.options import Options
    from lockstep.data.loader import PreparedLoader
    from lockstep.parallel.parallel_model import ParallelModel
    from lockstep.runtime.mesh import DeviceMeshes
    from lockstep.runtime.step import StepState


@dataclass(frozen=True)
class ObservedRun:
    """What an ``Accelerator`` prepares: lists that grow.

    Attributes:
        parameters_at_rest: All parameters, where they are sharded not gathered.
    """

    step: StepState
    meshes: DeviceMeshes
    models: Sequence[ParallelModel]
    optimizers: Sequence[object]
    parameters_at_rest: Callable[[], Iterable[torch.Tensor]]


class RunObserver:
    """Does nothing; what looks on overrides what it needs. Each method is called on every rank."""

    registered: ClassVar[list[RunObserver]] = []
    """Those of this process. Nobody is, but in the runs that `lockstep check`, `replay` and `tune` make."""
    refuses_steps: ClassVar[bool] = False
    """Whether ``may_step`` is to be asked."""

    def options(self, options: Options) -> Options:
        """Return what an ``Accelerator`` is to use in place of the options that were resolved."""
        return options

    def begins(self, run: ObservedRun) -> None:
        """Notice that an ``Accelerator`` prepares its first object."""

    def model_prepared(self, model: ParallelModel) -> None:
        """Notice a prepared model that will be trained."""

    def loader_comes(self, loader: DataLoader[object]) -> DataLoader[object]:
        """Return what is to be prepared in the place of a loader of the script."""
        return loader

    def loader_prepared(self, loader: PreparedLoader) -> None:
        """Notice a prepared loader."""

    def optimizer_prepared(self, optimizer: Optimizer) -> None:
        """Notice a prepared optimizer; this is the user's own."""

    def checkpoint_loaded(self, path: str) -> None:
        """Notice that the script has loaded a checkpoint by ``load_state``; ``path``: its directory, or URL."""

    def gathers_for_loss(self) -> None:
        """Notice that the script's loss is to depend on the batches of all ranks."""

    def trains_alone(self) -> None:
        """Hear that ranks are going to take steps of their own."""

    def backward_begins(self, loss: torch.Tensor, factor: torch.Tensor | float) -> None:
        """Hear that a backward of the script's ``loss`` begins: gradients will be those of ``factor`` times it, or
        times its weighted sum."""

    def may_step(self, optimizer: Optimizer) -> bool:
        """Return whether the user's own optimizer is to make the step that is due; gradients are unscaled."""
        return True

    def before_clip(self) -> None:
        """Gradients of a whole window are averaged, and not clipped yet; or not clipped at all before a step."""

    def clipped(self, norm: torch.Tensor | None) -> None:
        """Gradients were clipped; ``norm`` (0-d) is that before, None where their values were."""
