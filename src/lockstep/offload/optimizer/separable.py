"""Which optimizers may be stepped a few parameters at a time, and how much state they keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.comm.dtensor import is_dtensor

Group = dict[str, Any]


@dataclass(frozen=True)
class Separable:
    """An optimizer class that treats every parameter by itself.

    ``state_tensors``: how many tensors as large as a parameter it keeps for one of this group, at most.
    ``elementwise``: whether it treats every element by itself, so that shards may be stepped alone.
    """

    state_tensors: Callable[[Group], int]
    elementwise: bool = True


def _adam(group: Group) -> int:
    return 3 if group["amsgrad"] else 2


def _sgd(group: Group) -> int:
    return 1 if group["momentum"] else 0


def _rmsprop(group: Group) -> int:
    return 1 + bool(group["momentum"]) + bool(group["centered"])


def _one(group: Group) -> int:
    return 1


def _two(group: Group) -> int:
    return 2


SEPARABLE: dict[type[Optimizer], Separable] = {
    torch.optim.Adam: Separable(_adam),
    torch.optim.AdamW: Separable(_adam),
    torch.optim.NAdam: Separable(_two),
    torch.optim.RAdam: Separable(_two),
    torch.optim.Adamax: Separable(_two),
    torch.optim.Adadelta: Separable(_two),
    torch.optim.Adagrad: Separable(_one),
    torch.optim.ASGD: Separable(_one),
    torch.optim.Rprop: Separable(_two),
    torch.optim.RMSprop: Separable(_rmsprop),
    torch.optim.SGD: Separable(_sgd),
    torch.optim.Adafactor: Separable(_one, elementwise=False),
    **({torch.optim.Muon: Separable(_one, elementwise=False)} if hasattr(torch.optim, "Muon") else {}),
}
"""Of exactly these classes: one that inherits from them may have another step."""


def why_not_separable(optimizer_class: type[Optimizer], groups: Iterable[Group]) -> str | None:
    """Why parameters cannot be stepped a few at a time, as the end of a sentence; None if they can."""
    separable = SEPARABLE.get(optimizer_class)
    if separable is None:
        return f"{optimizer_class.__name__} is not known to treat every parameter by itself"
    groups = list(groups)
    if any(group.get("differentiable") for group in groups):
        return "differentiable=True keeps the graph of the whole step"
    if not separable.elementwise and any(is_dtensor(p) for group in groups for p in group["params"]):
        return f"{optimizer_class.__name__} looks at whole parameters, of which each rank has a shard"
    return None
