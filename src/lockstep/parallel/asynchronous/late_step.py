"""An optimizer's step that is made later than its gradients and its settings were there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.torch_internals import optim as torch_optim

SCHEDULED = ("lr", "momentum", "betas", "weight_decay")
"""What schedules change in an optimizer's groups. An update is applied with the values of its own step."""


def mark_as_stepped(optimizer: Any) -> None:
    """Set torch's own mark: schedulers warn if they advance before their optimizer has, which is late here."""
    torch_optim.note_step(getattr(optimizer, "optimizer", optimizer))


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    """Copies of what schedules change, group by group."""
    return [
        {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in found.items()}
        for group in optimizer.param_groups
        if (found := {key: group[key] for key in SCHEDULED if key in group}) is not None
    ]


@contextmanager
def with_settings(optimizer: Any, settings: list[dict[str, Any]]) -> Iterator[None]:
    """The optimizer with the settings of another step."""
    groups = optimizer.param_groups
    before = [{key: group[key] for key in values} for group, values in zip(groups, settings, strict=True)]
    try:
        for group, values in zip(groups, settings, strict=True):
            group.update(values)
        yield
    finally:
        for group, values in zip(groups, before, strict=True):
            group.update(values)


@contextmanager
def with_gradients(parameters: list[nn.Parameter], gradients: list[torch.Tensor | None]) -> Iterator[None]:
    """The parameters with these gradients; afterwards with their own, which may be those of an open window."""
    own = [parameter.grad for parameter in parameters]
    try:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        yield
    finally:
        for parameter, gradient in zip(parameters, own, strict=True):
            parameter.grad = gradient
