"""A split model's weights, gradients and state in whole-tensor form, on rank 0."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lockstep.check.compare import Digest, digest
from lockstep.check.observe import Observed
from lockstep.check.passes import PassResult
from lockstep.check.reference import Live
from lockstep.check.snapshot import Snapshot, numbers
from lockstep.checkpoint.contents import FullModelSpec, ties_of
from lockstep.checkpoint.weights.stages import collect_stages
from lockstep.comm.collectives import Communicator
from lockstep.comm.dtensor import is_dtensor, local
from lockstep.parallel.parallel_model import ParallelModel


class Collector:
    """Knows the names of the whole ``model``, as it is before it is split."""

    def __init__(self, model: nn.Module, communicator: Communicator) -> None:
        self._communicator = communicator
        self._numbers: dict[str, object] = {}
        self._whole = FullModelSpec((), ties_of(model))

    def is_ready(self, model: ParallelModel) -> bool:
        """Whether no rank holds gradients now. Collective."""
        mine = next(model.gradients(), None) is None
        return all(self._communicator.gather_object([mine]))

    def note_split(self, model: nn.Module) -> None:
        """Remember the numbers that modules keep when the model has just been split."""
        self._numbers = numbers(model)

    def live(self, model: nn.Module, snapshot: Snapshot) -> Live:
        """On rank 0: what the split model is made of now. Collective."""
        weights, trained = self._weights(model, snapshot)
        return Live(weights, trained, self._changed_numbers(model))

    def _changed_numbers(self, model: nn.Module) -> dict[str, object]:
        """Those that are other ones since, of all ranks' modules. Collective."""
        before = self._numbers
        mine = {name: v for name, v in numbers(model).items() if name in before and before[name] != v}
        changed: dict[str, Any] = {}
        for other in self._communicator.gather_object([mine]):
            changed |= other
        return changed

    def _weights(self, model: nn.Module, snapshot: Snapshot) -> tuple[dict[str, Tensor], dict[str, bool]]:
        """On rank 0: each weight and buffer by all its names, and whether weights are trained. Collective."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        state: dict[str, Any] = {name: p.detach() for name, p in parameters.items()}
        state |= snapshot.named_buffers()
        flags = {name: p.requires_grad for name, p in parameters.items()}
        trained: dict[str, bool] = {}
        for other in self._communicator.gather_object([flags]):
            trained |= other
        return collect_stages(state, self._communicator, self._whole), trained

    def gather(
        self, model: nn.Module, result: PassResult, before: dict[str, object]
    ) -> tuple[list[Digest], list[Observed]]:
        """Complete what the pass of the split model found, on rank 0. Collective.

        Returns digests of all ranks' copies of gradients, and what each rank has seen.
        """
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        held = {name: local(g) for name, g in found.items() if _is_whole(g)}
        result.gradients = {
            self._whole.ties.get(name, name): gradient
            for name, gradient in collect_stages(found, self._communicator, self._whole).items()
        }
        buffers = {name: buffer.detach() for name, buffer in model.named_buffers()}
        result.buffers = collect_stages(buffers, self._communicator, self._whole)
        now = numbers(model)
        changed = {name: value for name, value in now.items() if name in before}
        told = self._communicator.gather_object([(digest(held), result.observed, changed)])
        for _, _, attributes in reversed(told):
            result.attributes |= attributes
        return [one for one, _, _ in told], [one for _, one, _ in told]

    @staticmethod
    def drop_gradients(model: nn.Module) -> None:
        """Those of the pass."""
        for parameter in model.parameters():
            parameter.grad = None


def _is_whole(gradient: Any) -> bool:
    return not is_dtensor(gradient) or all(placement.is_replicate() for placement in gradient.placements)
