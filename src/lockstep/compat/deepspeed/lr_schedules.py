"""Learning rate schedules by name and parameters, as a DeepSpeed JSON describes them.

Each schedule is a formula of the number of optimizer steps done, equal to that of
``deepspeed.runtime.lr_schedules`` (0.19.8), whose sequences are recorded beside the tests. That
includes its start: the first two steps have the same learning rate, since its count begins at -1.

References: Goyal et al., Accurate, Large Minibatch SGD, 2017 (warm-up); Loshchilov and Hutter, SGDR,
ICLR 2017 (cosine).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.comm.tree import StateDict

# One for all parameter groups, or one for each.
Rate = float | tuple[float, ...]

LearningRate: TypeAlias = float | torch.Tensor


class LRSchedule(Protocol):
    """Learning rates of parameter group ``group`` after ``steps`` optimizer steps."""

    def lr(self, steps: int, group: int, own_lr: LearningRate) -> LearningRate:
        """Compute the learning rate from ``own_lr``, which the group had before the schedule began."""


class ScheduledLR(LRScheduler):
    """Sets learning rates by a ``LRSchedule``.

    ``counts_optimizer_steps``: one ``step`` stands for one step of the optimizer, on however many
    processes.
    """

    counts_optimizer_steps = True

    def __init__(self, optimizer: Optimizer, schedule: LRSchedule) -> None:
        self.schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[LearningRate]:
        return [self.schedule.lr(self.last_epoch, i, own_lr) for i, own_lr in enumerate(self.base_lrs)]

    def state_dict(self) -> StateDict:
        """Return how far it is; the formula comes from the configuration again."""
        return {name: value for name, value in super().state_dict().items() if name != "schedule"}


@dataclass(frozen=True, kw_only=True)
class WarmupLR:
    """From ``warmup_min_lr`` to ``warmup_max_lr`` in ``warmup_num_steps`` steps, then constant.

    ``warmup_max_lr`` None: each group's own learning rate. ``warmup_type``: ``log`` or ``linear``.
    """

    warmup_min_lr: Rate = 0.0
    warmup_max_lr: Rate | None = None
    warmup_num_steps: int = 1000
    warmup_type: str = "log"

    def lr(self, steps: int, group: int, own_lr: LearningRate) -> LearningRate:
        low = _rate_of_group(self.warmup_min_lr, group)
        high = own_lr if self.warmup_max_lr is None else _rate_of_group(self.warmup_max_lr, group)
        # DeepSpeed's count begins at -1: after n steps it stands at n - 1.
        return low + (high - low) * self._progress(max(0, steps - 1))

    def _progress(self, iteration: int) -> float:
        return _warmup(iteration, self.warmup_num_steps, self.warmup_type)


@dataclass(frozen=True, kw_only=True)
class WarmupDecayLR(WarmupLR):
    """``WarmupLR``, then linearly down to ``warmup_min_lr`` at step ``total_num_steps``."""

    total_num_steps: int
    warmup_max_lr: Rate | None = 0.001

    def _progress(self, iteration: int) -> float:
        warmup_steps = max(2, self.warmup_num_steps)
        if iteration < warmup_steps:
            return super()._progress(iteration)
        return max(0.0, (self.total_num_steps - iteration) / max(1, self.total_num_steps - warmup_steps))


@dataclass(frozen=True, kw_only=True)
class WarmupCosineLR:
    """Multiples of each group's own learning rate: up to 1, then along a cosine to ``cos_min_ratio``."""

    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: str = "log"

    def lr(self, steps: int, group: int, own_lr: LearningRate) -> LearningRate:
        return own_lr * (self._ratio(steps - 1) if steps else 0.0)

    def _ratio(self, iteration: int) -> float:
        warmup_steps = max(2, self.warmup_num_steps)
        if iteration < warmup_steps:
            progress = _warmup(iteration, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + progress * (1 - self.warmup_min_ratio)
        progress = min(1.0, (iteration - warmup_steps + 1) / max(1, self.total_num_steps - warmup_steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * cosine)


def _warmup(iteration: int, num_steps: int, kind: str) -> float:
    # The logarithm of 1 cannot be divided by.
    num_steps = max(2, num_steps)
    if iteration >= num_steps:
        return 1.0
    return iteration / num_steps if kind == "linear" else math.log(iteration + 1) / math.log(num_steps)


def _rate_of_group(rate: Rate, group: int) -> float:
    return rate[group] if isinstance(rate, tuple) else rate


SCHEDULES: dict[str, type[WarmupLR | WarmupDecayLR | WarmupCosineLR]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
