"""Learning rate schedules by name and parameters, as a DeepSpeed JSON describes them.

Each schedule is a formula of the number of optimizer steps done, equal to that of
``deepspeed.runtime.lr_schedules`` (0.19.8), whose sequences are recorded beside the tests. That
includes its start: the first two steps have the same learning rate, since its count begins at -1.

References: Goyal et al., Accurate, Large Minibatch SGD, 2017 (warm-up); Loshchilov and Hutter, SGDR,
ICLR 2017 (cosine); Smith, A disciplined approach to neural network hyper-parameters, 2018 (one
cycle, range test).
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
    """Learning rates and betas of parameter group ``group`` after ``steps`` optimizer steps."""

    def lr(self, steps: int, group: int, own_lr: LearningRate) -> LearningRate:
        """``own_lr`` is the learning rate that the group had before the schedule began."""

    def betas(self, steps: int, group: int) -> tuple[float, float] | None:
        """None: they are left alone."""


class ScheduledLR(LRScheduler):
    """Sets learning rates, and for OneCycle betas, by a ``LRSchedule``.

    ``counts_optimizer_steps``: one ``step`` stands for one step of the optimizer, on however many
    processes.
    """

    counts_optimizer_steps = True

    def __init__(self, optimizer: Optimizer, schedule: LRSchedule) -> None:
        self.schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[LearningRate]:
        return [self.schedule.lr(self.last_epoch, i, own_lr) for i, own_lr in enumerate(self.base_lrs)]

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        for i, group in enumerate(self.optimizer.param_groups):
            betas = self.schedule.betas(self.last_epoch, i)
            if betas is not None:
                group["betas"] = betas

    def state_dict(self) -> StateDict:
        """How far it is; the formula comes from the configuration again."""
        return {name: value for name, value in super().state_dict().items() if name != "schedule"}


class _LearningRateAlone:
    def betas(self, steps: int, group: int) -> tuple[float, float] | None:
        return None


@dataclass(frozen=True, kw_only=True)
class WarmupLR(_LearningRateAlone):
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
class WarmupCosineLR(_LearningRateAlone):
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


@dataclass(frozen=True, kw_only=True)
class OneCycle:
    """Up from ``cycle_min_lr`` to ``cycle_max_lr`` and down again once, then a slow decay.

    With ``cycle_momentum`` the first beta goes the other way between ``cycle_max_mom`` and
    ``cycle_min_mom`` (the very first step has ``cycle_min_mom``), and the second is 0.99.
    A stair count above 0 makes that many steps of a half; ``decay_step_size`` 0 means no decay.
    """

    cycle_min_lr: Rate
    cycle_max_lr: Rate
    decay_lr_rate: float = 0.0
    cycle_first_step_size: float = 2000
    cycle_second_step_size: float | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: float = 0
    cycle_momentum: bool = True
    cycle_min_mom: Rate = 0.8
    cycle_max_mom: Rate = 0.9
    decay_mom_rate: float = 0.0

    def lr(self, steps: int, group: int, own_lr: LearningRate) -> LearningRate:
        low, high = _rate_of_group(self.cycle_min_lr, group), _rate_of_group(self.cycle_max_lr, group)
        if self._is_in_cycle(steps):
            return low + (high - low) * self._height(steps)
        return low / self._decay(steps, self.decay_lr_rate)

    def betas(self, steps: int, group: int) -> tuple[float, float] | None:
        if not self.cycle_momentum:
            return None
        low, high = _rate_of_group(self.cycle_min_mom, group), _rate_of_group(self.cycle_max_mom, group)
        if steps == 0:
            return low, 0.99
        if self._is_in_cycle(steps):
            return high - (high - low) * self._height(steps), 0.99
        return high * self._decay(steps, self.decay_mom_rate), 0.99

    @property
    def _second_step_size(self) -> float:
        second = self.cycle_second_step_size
        return self.cycle_first_step_size if second is None else second

    def _is_in_cycle(self, steps: int) -> bool:
        return steps - 1 < self.cycle_first_step_size + self._second_step_size

    def _height(self, steps: int) -> float:
        """0 at the ends of the cycle, 1 where its halves meet."""
        first, second = self.cycle_first_step_size, self._second_step_size
        position = steps % (first + second)
        rises = position <= first
        height = position / first if rises else (first + second - position) / second
        stairs = self.cycle_first_stair_count
        if not rises and self.cycle_second_stair_count is not None:
            stairs = self.cycle_second_stair_count
        if not stairs:
            return height
        # Multiplied before divided, so that rounding cannot take it a whole stair down.
        exact = position * stairs / first if rises else (first + second - position) * stairs / second
        return math.floor(exact) / stairs

    def _decay(self, steps: int, rate: float) -> float:
        if not self.decay_step_size:
            return 1.0
        after = steps - (self.cycle_first_step_size + self._second_step_size)
        return 1 + rate * after / self.decay_step_size


@dataclass(frozen=True, kw_only=True)
class LRRangeTest(_LearningRateAlone):
    """Grows from ``lr_range_test_min_lr`` by ``lr_range_test_step_rate`` times it in each interval."""

    lr_range_test_min_lr: Rate = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def lr(self, steps: int, group: int, own_lr: LearningRate) -> LearningRate:
        intervals = steps / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            intervals = math.floor(intervals)
        return _rate_of_group(self.lr_range_test_min_lr, group) * (
            1 + self.lr_range_test_step_rate * intervals
        )


def _warmup(iteration: int, num_steps: int, kind: str) -> float:
    # The logarithm of 1 cannot be divided by.
    num_steps = max(2, num_steps)
    if iteration >= num_steps:
        return 1.0
    return iteration / num_steps if kind == "linear" else math.log(iteration + 1) / math.log(num_steps)


def _rate_of_group(rate: Rate, group: int) -> float:
    return rate[group] if isinstance(rate, tuple) else rate


SCHEDULES: dict[str, type[WarmupLR | WarmupDecayLR | WarmupCosineLR | OneCycle | LRRangeTest]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
