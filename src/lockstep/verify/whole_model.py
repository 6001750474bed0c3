"""The whole model, as it was before it was split, and the split one's tensors in whole form, on rank 0.

Of the whole model the structure is copied at once, and weights are brought when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.checkpoint.contents import FullModelSpec, ties_of
from lockstep.checkpoint.weights.export import collect_stages
from lockstep.comm.collectives import Communicator
from lockstep.comm.dtensor import is_dtensor, local
from lockstep.errors import UsageError
from lockstep.model.contents import copy_of
from lockstep.parallel.determinism import BeforeWrites
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.runtime.host_memory import free_host_bytes
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals.dispatch import WithoutCollectives
from lockstep.verify.compare import GradientSums, digest
from lockstep.verify.module_sums import Observed, observed
from lockstep.verify.passes import ComparedBatch, PassResult, run_pass
from lockstep.verify.rounding import disturbed
from lockstep.verify.snapshot import Snapshot, numbers, set_numbers

COPIES = 5
"""Of the weights that must fit into memory: themselves and their gradients, both again off by a rounding step, and room
for activations."""


@dataclass(frozen=True)
class SplitModelState:
    """What the split model is made of now, by full name: weights and buffers, which weights are trained, and numbers
    that modules keep and that a script has changed."""

    tensors: Mapping[str, Tensor]
    trained: Mapping[str, bool]
    numbers: Mapping[str, object]


class Reference:
    """A copy of a model's structure whose parameters take no memory until ``filled``.

    Raises:
        UsageError: the model cannot be copied.
    """

    def __init__(self, model: nn.Module) -> None:
        # deepcopy takes these for copies that it has made, and none of the weights is copied.
        memo: dict[int, object] = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in nn.Module.parameters(model)
        }
        for parameter in nn.Module.parameters(model):
            memo[id(parameter)].__dict__.update(vars(parameter))
        self.nbytes = sum(p.nbytes for p in nn.Module.parameters(model))
        try:
            self.model: nn.Module = copy_of(model, memo)
        except Exception as error:
            # Whatever a user's module raises.
            raise UsageError(
                f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}). Give the object "
                "that cannot be copied a __deepcopy__ method."
            ) from error
        # A script may change one and change it back: each run starts from these.
        self._numbers = numbers(self.model)

    def check_memory(self, device: torch.device) -> None:
        """
        Check that weights and gradients fit.

        Raises:
            UsageError: weights and gradients do not fit into the memory of ``device``.
        """
        free = free_host_bytes()
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
        if COPIES * self.nbytes > free:
            raise UsageError(
                f"a whole copy with gradients needs {COPIES * self.nbytes / 2**30:.1f} GiB, but "
                f"{free / 2**30:.1f} GiB are free on {device}. Verify a smaller configuration of the same model "
                "instead."
            )

    @contextmanager
    def filled(
        self, weights: Mapping[str, Tensor], trained: Mapping[str, bool], device: torch.device
    ) -> Iterator[nn.Module]:
        """Give the model with these weights and buffers (by full name), on ``device``; afterwards it has none."""
        made: dict[int, nn.Parameter] = {}
        empty: list[tuple[dict[str, object], str, nn.Parameter]] = []
        buffers: list[tuple[dict[str, object], str, object]] = []
        for prefix, module in self.model.named_modules(remove_duplicate=False):
            registered = torch_modules.parameters_of(module)
            for name, parameter in registered.items():
                full = f"{prefix}.{name}" if prefix else name
                if parameter is None or full not in weights:
                    continue
                # Tied weights stand in several modules, and are one parameter here as well.
                if id(parameter) not in made:
                    of_this = nn.Parameter(
                        weights[full].to(device), trained.get(full, parameter.requires_grad)
                    )
                    of_this.__dict__.update(vars(parameter))
                    made[id(parameter)] = of_this
                empty.append((registered, name, parameter))
            own = torch_modules.buffers_of(module)
            for name, buffer in own.items():
                full = f"{prefix}.{name}" if prefix else name
                if buffer is not None:
                    value = weights.get(full, buffer).to(device)
                    # A copy of its own: the forward may write to it.
                    own[name] = value.clone() if value is buffer else value
                    buffers.append((own, name, buffer))
        for registered, name, parameter in empty:
            registered[name] = made[id(parameter)]
        for module in self.model.modules():
            # Recurrent modules read their weights from a list of their own.
            if torch_modules.has_flat_weights(module):
                torch_modules.renew_flat_weights(module)
        try:
            yield self.model
        finally:
            for registered, name, parameter in empty:
                registered[name] = parameter
            for own, name, buffer in buffers:
                own[name] = buffer

    def run(
        self,
        batch: ComparedBatch,
        live: SplitModelState,
        device: torch.device,
        without_chance: Callable[[nn.Module], AbstractContextManager[None]],
        look: bool,
    ) -> PassResult:
        """Run one pass with what the split model is made of; ``look``: what modules do is observed."""
        return self._run(batch, live, live.tensors, device, without_chance, look, None)

    def run_disturbed(
        self,
        batch: ComparedBatch,
        live: SplitModelState,
        device: torch.device,
        without_chance: Callable[[nn.Module], AbstractContextManager[None]],
        half: torch.dtype | None,
    ) -> PassResult:
        """Run the same with weights and inputs off by one rounding step.

        ``half``: a type of 16 bits in which weights are gathered; the pass is one in mixed precision then.
        """
        norms = (module for module in self.model.modules() if isinstance(module, torch_modules.BatchNorm))
        kept = {id(p) for module in norms for p in module.parameters()}
        named = self.model.named_parameters(remove_duplicate=False)
        # As ``fully_shard`` is told in ``parallel/zero/apply.py``.
        cast = {name for name, p in named if half is not None and p.ndim and id(p) not in kept}
        weights = _Disturbed(live, half, cast)
        moved = batch.changed(lambda tensor: disturbed(tensor).requires_grad_(tensor.requires_grad))
        return self._run(moved, live, weights, device, without_chance, False, half)

    def _run(
        self,
        batch: ComparedBatch,
        live: SplitModelState,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        without_chance: Callable[[nn.Module], AbstractContextManager[None]],
        look: bool,
        half: torch.dtype | None,
    ) -> PassResult:
        set_numbers(self.model, {**self._numbers, **live.numbers})
        autocast = torch.autocast(device.type, half, enabled=half is not None)
        with autocast, self.filled(tensors, live.trained, device) as model, without_chance(model):
            snapshot = Snapshot(model)
            try:
                notes = BeforeWrites(snapshot.before_write)
                with observed(model if look else None) as seen, notes, WithoutCollectives():
                    result = run_pass(
                        _call_of(model), batch.detached(), lambda objective: objective.backward()
                    )
                result.observed = seen
                _complete(result, model, snapshot)
                _forget_notes(result, model, batch)
            finally:
                snapshot.restore()
                for parameter in nn.Module.parameters(model):
                    parameter.grad = None
        return result


class _Disturbed(Mapping[str, Tensor]):
    """Weights off by one rounding step, one when it is asked for; buffers as they are."""

    def __init__(self, live: SplitModelState, half: torch.dtype | None, cast: Collection[str]) -> None:
        self._live, self._half, self._cast = live, half, cast

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._live.tensors[name]
        if name not in self._live.trained or not tensor.is_floating_point():
            return tensor
        return disturbed(tensor, self._half if name in self._cast else None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._live.tensors)

    def __len__(self) -> int:
        return len(self._live.tensors)


def _call_of(model: nn.Module) -> Callable[[ComparedBatch], object]:
    def call(given: ComparedBatch) -> object:
        output = model(*given.args, **given.kwargs)
        return output if given.loss_function is None else given.loss_function(output, *given.targets)

    return call


def _complete(result: PassResult, model: nn.Module, before: Snapshot) -> None:
    """Add gradients, and what the forward has changed."""
    result.gradients = {
        name: p.grad.detach().cpu() for name, p in model.named_parameters() if p.grad is not None
    }
    old = before.named_buffers()
    result.buffers = {
        name: buffer.detach().cpu().clone()
        for name, buffer in model.named_buffers()
        if name in old and not _equal(buffer, old[name])
    }
    result.attributes = before.changed_numbers()


def _forget_notes(result: PassResult, model: nn.Module, batch: ComparedBatch) -> None:
    """Leave out what a second forward does not change again: sizes that are noted, not counts."""
    if not result.attributes and not result.buffers:
        return
    first = numbers(model)
    with torch.no_grad():
        _call_of(model)(batch.detached())
    again, later = numbers(model), dict(model.named_buffers())
    result.attributes = {
        name: value for name, value in result.attributes.items() if again.get(name) != first.get(name)
    }
    result.buffers = {
        name: value for name, value in result.buffers.items() if not _equal(later[name].cpu(), value)
    }


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all())


class Collector:
    """Knows the names of the whole ``model``, as it is before it is split."""

    def __init__(self, model: nn.Module, communicator: Communicator) -> None:
        self._communicator = communicator
        self._numbers: dict[str, object] = {}
        self._whole = FullModelSpec((), ties_of(model))

    def is_ready(self, model: ParallelModel) -> bool:
        """Return whether no rank holds gradients now. Collective."""
        mine = next(model.gradients(), None) is None
        return all(self._communicator.gather_object([mine]))

    def note_split(self, model: nn.Module) -> None:
        """Remember the numbers that modules keep when the model has just been split."""
        self._numbers = numbers(model)

    def live(self, model: nn.Module, snapshot: Snapshot) -> SplitModelState:
        """Return on rank 0 what the split model is made of now. Collective."""
        weights, trained = self._weights(model, snapshot)
        return SplitModelState(weights, trained, self._changed_numbers(model))

    def _changed_numbers(self, model: nn.Module) -> dict[str, object]:
        """Return the numbers that are other ones since, of all ranks' modules. Collective."""
        before = self._numbers
        mine = {name: v for name, v in numbers(model).items() if name in before and before[name] != v}
        changed: dict[str, object] = {}
        for other in self._communicator.gather_object([mine]):
            changed |= other
        return changed

    def _weights(self, model: nn.Module, snapshot: Snapshot) -> tuple[dict[str, Tensor], dict[str, bool]]:
        """Return on rank 0 each weight and buffer by all its names, and whether weights are trained. Collective."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        state: dict[str, object] = {name: p.detach() for name, p in parameters.items()}
        state |= snapshot.named_buffers()
        flags = {name: p.requires_grad for name, p in parameters.items()}
        trained: dict[str, bool] = {}
        for other in self._communicator.gather_object([flags]):
            trained |= other
        return collect_stages(state, self._communicator, self._whole), trained

    def gather(
        self, model: nn.Module, result: PassResult, before: dict[str, object]
    ) -> tuple[list[GradientSums], list[Observed]]:
        """Complete what the pass of the split model found, on rank 0. Collective.

        Returns digests of all ranks' copies of gradients, and what each rank has seen.
        """
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        whole_gradients = {name: local(g) for name, g in found.items() if _is_whole(g)}
        result.gradients = {
            self._whole.ties.get(name, name): gradient
            for name, gradient in collect_stages(found, self._communicator, self._whole).items()
        }
        buffers = {name: buffer.detach() for name, buffer in model.named_buffers()}
        result.buffers = collect_stages(buffers, self._communicator, self._whole)
        now = numbers(model)
        changed = {name: value for name, value in now.items() if name in before}
        reports = self._communicator.gather_object([(digest(whole_gradients), result.observed, changed)])
        # From the back, so that the first rank's value is the one that stays.
        for _, _, attributes in reversed(reports):
            result.attributes |= attributes
        return [one for one, _, _ in reports], [one for _, one, _ in reports]

    @staticmethod
    def drop_gradients(model: nn.Module) -> None:
        """Drop the gradients of the pass."""
        for parameter in nn.Module.parameters(model):
            parameter.grad = None


def _is_whole(gradient: object) -> bool:
    return not is_dtensor(gradient) or all(placement.is_replicate() for placement in gradient.placements)
