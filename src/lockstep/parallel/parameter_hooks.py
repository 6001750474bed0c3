"""What has been done to a model that cannot be right once it is spread: hooks on its parameters, other parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import nn

from lockstep.errors import UsageError
from lockstep.torch_internals import fsdp2
from lockstep.torch_internals.modules import children_of, every_parameter, parameters_of
from lockstep.torch_internals.tensors import kind_of_hook


def refuse_hooks(model: nn.Module, parallel: object, world_size: int) -> None:
    """Raise UsageError if a parameter has a hook on any rank: its place is taken by one that has gradients in parts.

    A hook would see one rank's own gradient, or its part of the mean, where in plain torch it sees the whole.
    Collective.
    """
    mine = ((name, kind_of_hook(parameter)) for name, parameter in model.named_parameters())
    first = next(((name, kind) for name, kind in mine if kind is not None), None)
    of_ranks: list[tuple[str, str] | None] = [None] * world_size
    dist.all_gather_object(of_ranks, first)
    for name, kind in filter(None, of_ranks):
        raise _hooked(type(model).__name__, name, kind, parallel)


def _hooked(model: str, name: str, kind: str, parallel: object) -> UsageError:
    return UsageError(
        f"'{name}' of {model} has a hook by {kind}, which parallel='{parallel}' cannot keep: each rank has only "
        "a part of the gradient, but the hook needs the whole. Change gradients between accelerator.backward() "
        "and optimizer.step(), use a hook of a module (register_full_backward_hook), or use parallel='ddp'."
    )


class SameParameters:
    """Notices that a sharded model has got other parameters than it was sharded with."""

    def __init__(self, model: nn.Module, groups: list[object], parallel: object) -> None:
        self._model = model
        self._kind = type(model).__name__.removeprefix("FSDP")
        self._groups = groups
        self._parallel = parallel
        # Numbers, not objects: torch swaps the object in a slot between shard and whole, which is no change.
        self._others = [p for _, p in _slots(model) if id(p) not in self._numbers(())]
        self._known = self._numbers(self._others)
        self._expected = [self._known[id(p)] for _, p in _slots(model)]
        self._is_whole = {id(p) for p in self._others}

    def check(self) -> None:
        """Raise UsageError if parameters were replaced, added, removed or tied, or if a shard has a hook."""
        parameters = every_parameter(self._model)
        try:
            numbers = [self._known[id(p)] for p in parameters]
        except KeyError:
            numbers = []
        if numbers != self._expected:
            self._look_closely()
        for parameter in parameters:
            if kind_of_hook(parameter) is not None:
                self._refuse_hook(parameter)

    def _look_closely(self) -> None:
        # torch may have made new objects for the same parameters.
        self._known = self._numbers(self._others)
        expected = iter(self._expected)
        for name, parameter in _slots(self._model):
            if self._known.get(id(parameter)) != next(expected, None):
                raise UsageError(
                    f"'{name}' of {self._kind} was replaced by another parameter after the model was prepared. "
                    f"parallel='{self._parallel}' trains only the parameters that a model has in "
                    "accelerator.prepare(). Change the model before prepare, or use parallel='ddp'."
                )
        if next(expected, None) is not None:
            raise UsageError(
                f"{self._kind} has fewer parameters than when it was prepared with parallel='"
                f"{self._parallel}'. Change the model before accelerator.prepare()."
            )

    def _refuse_hook(self, parameter: object) -> None:
        is_shard = any(
            parameter is fsdp2.sharded_param(p) for group in self._groups for p in fsdp2.params(group)
        )
        kind = kind_of_hook(parameter)
        if kind is not None and (is_shard or id(parameter) in self._is_whole):
            name = next(name for name, p in _slots(self._model) if p is parameter)
            raise _hooked(self._kind, name, kind, self._parallel)

    def _numbers(self, others: Sequence[object]) -> dict[int, int]:
        """By ``id`` of each tensor that may stand in the model, the number of the parameter that it is."""
        records = [param for group in self._groups for param in fsdp2.params(group)]
        numbers = {id(form): number for number, param in enumerate(records) for form in fsdp2.forms(param)}
        return numbers | {id(p): len(records) + number for number, p in enumerate(others)}


def _slots(model: nn.Module) -> Iterator[tuple[str, object]]:
    """(name, parameter) of each place in the model, in the order of ``every_parameter``."""
    waiting: list[tuple[str, nn.Module | None]] = [("", model)]
    while waiting:
        prefix, module = waiting.pop()
        if module is not None:
            yield from ((prefix + name, p) for name, p in parameters_of(module).items() if p is not None)
            waiting.extend((f"{prefix}{name}.", child) for name, child in children_of(module).items())
