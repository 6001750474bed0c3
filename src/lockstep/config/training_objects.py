"""Optimizers and schedulers as a file describes them; built later, where there are parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class Placeholder:
    """Stands for an object that a configuration describes, until ``prepare`` builds that one."""


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer by name: ``type`` such as ``AdamW``, ``params`` such as ``{"lr": 1e-3}``.

    With ``replaces`` it takes the place, and the parameters, of an optimizer that ``prepare`` is given.
    """

    type: str
    params: dict[str, Any]
    replaces: bool = field(default=False, repr=False)


@dataclass(frozen=True)
class SchedulerConfig:
    """A learning rate schedule by name: ``type`` such as ``WarmupLR``, ``params`` its arguments."""

    type: str
    params: dict[str, Any]
