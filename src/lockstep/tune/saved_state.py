"""What a trial inside of a training process changes, put back bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.check.snapshot import Snapshot
from lockstep.comm.tree import StateDict


class SavedState:
    """Parameters, gradients, buffers, plain attributes of modules, optimizer state, and all random number generators.

    Copies are in host memory, so that those of a model on another device do not take of its memory.

    Attributes:
        nbytes: Of the copies.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._snapshot = Snapshot(model)
        self._optimizer = optimizer
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # A model may share a parameter, and an optimizer have some of another model: each once.
        parameters = {id(parameter): parameter for parameter in [*nn.Module.parameters(model), *own]}
        self._parameters = [
            (parameter, _copied(parameter), parameter.grad) for parameter in parameters.values()
        ]
        self._states = [(key, state, _saved(state)) for key, state in optimizer.state.items()]
        self._groups = [(group, _saved(group, without=("params",))) for group in optimizer.param_groups]
        copies = [number for _, number, _ in self._parameters]
        copies += [number for _, _, saved in self._states for _, _, number in saved if _is_tensor(number)]
        self.nbytes = sum(number.nbytes for number in copies)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for parameter, number, gradient in self._parameters:
            parameter.copy_(number)
            parameter.grad = gradient
        # State of the attempt goes; tensors from before are filled again, as the script may hold them.
        self._optimizer.state.clear()
        for key, state, saved in self._states:
            state.clear()
            _put_back(state, saved)
            self._optimizer.state[key] = state
        for group, saved in self._groups:
            _put_back(group, saved)
        self._snapshot.restore()


SavedValues = list[tuple[str, Any, Any]]
"""Key, the value itself, and a copy of it."""


def _saved(values: StateDict, without: Iterable[str] = ()) -> SavedValues:
    return [
        (key, value, _copied(value) if _is_tensor(value) else copy.deepcopy(value))
        for key, value in values.items()
        if key not in without
    ]


def _put_back(values: dict[str, object], saved: SavedValues) -> None:
    for key, value, copied in saved:
        if _is_tensor(value):
            value.copy_(copied)
            values[key] = value
        else:
            values[key] = copied


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
