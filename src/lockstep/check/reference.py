"""The whole model, as it was before it was split: its structure at once, its weights when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from lockstep.check.observe import observed
from lockstep.check.passes import ComparedBatch, PassResult, run_pass
from lockstep.check.snapshot import Snapshot, numbers, set_numbers
from lockstep.errors import UsageError
from lockstep.model.contents import copy_of
from lockstep.parallel.determinism import BeforeWrites
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals.dispatch import WithoutCollectives

COPIES = 3
"""Of the weights that must fit into memory: themselves, their gradients, and room for activations."""


@dataclass(frozen=True)
class Live:
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
        memo: dict[int, object] = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in model.parameters()
        }
        for parameter in model.parameters():
            memo[id(parameter)].__dict__.update(vars(parameter))
        self.nbytes = sum(p.nbytes for p in model.parameters())
        try:
            self.model: nn.Module = copy_of(model, memo)
        except Exception as error:  # whatever a user's module raises
            raise UsageError(
                f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}). Give what cannot be "
                "copied a __deepcopy__ method."
            ) from error
        self._numbers = numbers(self.model)  # a script may change one, and change it back

    def check_memory(self, device: torch.device) -> None:
        """
        Raises:
            UsageError: weights and gradients do not fit into the memory of ``device``.
        """
        free = psutil.virtual_memory().available
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
        if COPIES * self.nbytes > free:
            raise UsageError(
                f"a whole copy with gradients needs {COPIES * self.nbytes / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB "
                f"are free on {device}. Make sure with a smaller configuration of the same model."
            )

    @contextmanager
    def filled(
        self, weights: Mapping[str, Tensor], trained: Mapping[str, bool], device: torch.device
    ) -> Iterator[nn.Module]:
        """The model with these weights and buffers (by full name) inside, on ``device``; afterwards without any."""
        made: dict[int, nn.Parameter] = {}
        empty: list[tuple[dict[str, object], str, nn.Parameter]] = []
        buffers: list[tuple[dict[str, object], str, Any]] = []
        for prefix, module in self.model.named_modules(remove_duplicate=False):
            registered = torch_modules.parameters_of(module)
            for name, parameter in registered.items():
                full = f"{prefix}.{name}" if prefix else name
                if parameter is None or full not in weights:
                    continue
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
                    own[name] = value.clone() if value is buffer else value
                    buffers.append((own, name, buffer))
        for registered, name, parameter in empty:
            registered[name] = made[id(parameter)]
        for module in self.model.modules():
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
        live: Live,
        device: torch.device,
        without_chance: Callable[[nn.Module], AbstractContextManager[None]],
        look: bool,
        rounding: torch.dtype | None = None,
    ) -> PassResult:
        """One pass with what the split model is made of; ``look``: what modules do is observed.

        ``rounding``: weights and products are rounded to that type.
        """
        set_numbers(self.model, {**self._numbers, **live.numbers})
        tensors = live.tensors if rounding is None else _Rounding(live, rounding)
        autocast = torch.autocast(device.type, rounding, enabled=rounding is not None)
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
                for parameter in model.parameters():
                    parameter.grad = None
        return result


class _Rounding(Mapping[str, Tensor]):
    """Weights rounded to a type, one when it is asked for; buffers as they are."""

    def __init__(self, live: Live, dtype: torch.dtype) -> None:
        self._live, self._dtype = live, dtype

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._live.tensors[name]
        if name not in self._live.trained or not tensor.is_floating_point():
            return tensor
        return tensor.to(self._dtype).to(tensor.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._live.tensors)

    def __len__(self) -> int:
        return len(self._live.tensors)


def _call_of(model: nn.Module) -> Callable[[ComparedBatch], object]:
    def call(given: ComparedBatch) -> Any:
        output = model(*given.args, **given.kwargs)
        return output if given.loss_function is None else given.loss_function(output, *given.targets)

    return call


def _complete(result: PassResult, model: nn.Module, before: Snapshot) -> None:
    """With gradients, and with what the forward has changed."""
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
