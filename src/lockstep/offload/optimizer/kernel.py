"""The user's optimizer, run on some of its parameters; and which optimizers may be run so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from lockstep.comm.dtensor import is_dtensor
from lockstep.errors import OffloadError
from lockstep.torch_internals import tensors as torch_tensors
from lockstep.torch_internals.optim import FILLS_LISTS, step_without_hooks


@dataclass(frozen=True)
class GradientScale:
    """What ``clip_grads_with_norm_`` does to gradients of which ``norm`` (0-d) is the norm."""

    max_norm: float
    norm: torch.Tensor

    def changes_nothing(self) -> bool:
        # The factor that torch clamps to 1.
        return bool(float(self.max_norm) / (self.norm + 1e-6) >= 1.0)

    @torch.no_grad()
    def apply(self, gradients: Sequence[torch.Tensor]) -> None:
        """Scale plain tensors in place."""
        # It takes parameters, of which it looks at nothing but ``grad``.
        holders: Any = [SimpleNamespace(grad=gradient) for gradient in gradients]
        clip_grads_with_norm_(holders, self.max_norm, self.norm)


GroupSettings = dict[str, Any]


@dataclass(frozen=True)
class Separable:
    """An optimizer class that treats every parameter by itself.

    ``state_tensors``: how many tensors as large as a parameter it keeps for one of this group, at most.
    ``elementwise``: whether it treats every element by itself, so that shards may be stepped alone.
    """

    state_tensors: Callable[[GroupSettings], int]
    elementwise: bool = True


def _adam(group: GroupSettings) -> int:
    return 3 if group["amsgrad"] else 2


def _sgd(group: GroupSettings) -> int:
    return 1 if group["momentum"] else 0


def _rmsprop(group: GroupSettings) -> int:
    return 1 + bool(group["momentum"]) + bool(group["centered"])


def _one(group: GroupSettings) -> int:
    return 1


def _two(group: GroupSettings) -> int:
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


def why_not_separable(optimizer_class: type[Optimizer], groups: Iterable[GroupSettings]) -> str | None:
    """Why parameters cannot be stepped a few at a time, as the end of a sentence; None if they can."""
    separable = SEPARABLE.get(optimizer_class)
    if separable is None:
        return f"{optimizer_class.__name__} is not known to update each parameter separately"
    groups = list(groups)
    if any(group.get("differentiable") for group in groups):
        return "differentiable=True keeps the graph of the whole step"
    if not separable.elementwise and any(is_dtensor(p) for group in groups for p in group["params"]):
        return f"{optimizer_class.__name__} needs whole parameters, but each rank has a shard"
    return None


_OWN = ("state", "param_groups", "step", "_offloaded_step", FILLS_LISTS)
"""Attributes of an optimizer that are its own, not those of a copy that steps a part of it."""


@dataclass(eq=False)
class KernelEntry:
    """What a step needs of one parameter.

    ``value``, ``gradient``: plain tensors on the host: the whole, or this rank's shard. ``watched``: the gradient that
    the user sees, and its version at ``step``. ``scale``: what is to be done to ``gradient`` (in a file) first.
    """

    parameter: torch.Tensor
    group: int
    value: torch.Tensor
    gradient: torch.Tensor
    watched: torch.Tensor
    version: int
    scale: GradientScale | None = None


@dataclass(frozen=True)
class OptimizerSettings:
    """All that one step of an optimizer depends on besides parameters, gradients and state, copied."""

    optimizer_class: type[Optimizer]
    attributes: dict[str, object]
    groups: list[GroupSettings]
    threads: int


def settings_of(optimizer: Optimizer, optimizer_class: type[Optimizer]) -> OptimizerSettings:
    """Return the settings of now: a scheduler or loss scaler may change them, also in place, before the step
    is made.

    They are those of a step on the host.
    """
    attributes = {name: _copied(value) for name, value in vars(optimizer).items() if name not in _OWN}
    groups = [
        {name: _copied(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    if any(p.device.type != "cpu" for group in optimizer.param_groups for p in group["params"]):
        # To be captured in a graph of the device, which the host's part of the work cannot be.
        groups = [{**group, "capturable": False} if "capturable" in group else group for group in groups]
    # How kernels are cut into vectors, and so the last bit, may depend on the number of threads.
    return OptimizerSettings(optimizer_class, attributes, groups, torch.get_num_threads())


def _copied(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value


def step_some(
    settings: OptimizerSettings,
    entries: list[KernelEntry],
    values: list[torch.Tensor],
    gradients: list[torch.Tensor],
    states: list[dict[str, object]],
) -> list[dict[str, object]]:
    """Change ``values`` and ``states`` in place as the optimizer's step does; returns the states afterwards.

    A gradient has its value's shape and dtype.

    Raises:
        OffloadError: A gradient was written to since ``step``.
    """
    if torch.get_num_threads() != settings.threads:
        torch.set_num_threads(settings.threads)
    parameters = [nn.Parameter(value, requires_grad=False) for value in values]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        # torch refuses a gradient of another dtype unless grad_dtype allows it.
        if gradient.dtype != parameter.dtype and hasattr(parameter, "grad_dtype"):
            parameter.grad_dtype = gradient.dtype
        parameter.grad = gradient
    afterwards: dict[object, dict[str, object]] = defaultdict(dict)
    _part_of(settings, entries, parameters, states, afterwards)
    # Behind the step, which may have read what was written at any time before.
    for entry in entries:
        if torch_tensors.version(entry.watched) != entry.version:
            raise OffloadError(
                f"A gradient of shape {tuple(entry.parameter.shape)} was written to while the step that reads it "
                "was still running. Set gradients to zero with optimizer.zero_grad(), which waits, or set them "
                "to None."
            )
    return [afterwards.get(parameter, {}) for parameter in parameters]


def _part_of(
    settings: OptimizerSettings,
    entries: list[KernelEntry],
    parameters: list[nn.Parameter],
    states: list[dict[str, object]],
    state: dict[object, dict[str, object]],
) -> None:
    """Step a copy of the optimizer that has these parameters alone, and no hooks."""
    by_group: dict[int, list[nn.Parameter]] = {}
    for entry, parameter, own in zip(entries, parameters, states, strict=True):
        by_group.setdefault(entry.group, []).append(parameter)
        if own:
            state[parameter] = own
    # Without __init__, which would want parameters and set everything anew.
    copy = object.__new__(settings.optimizer_class)
    vars(copy).update(settings.attributes)
    copy.state = state  # type: ignore[assignment]
    copy.param_groups = [{**settings.groups[group], "params": own} for group, own in by_group.items()]
    step_without_hooks(settings.optimizer_class)(copy)
