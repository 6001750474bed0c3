"""Stand-ins for what a DeepSpeed configuration describes, replaced by the real objects; its schedulers."""

from __future__ import annotations

import inspect
import math
import warnings
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from lockstep.compat.deepspeed.lr_schedule_params import parse_schedule, refuse_unknown
from lockstep.compat.deepspeed.lr_schedules import (
    SCHEDULES,
    ScheduledLR,
    WarmupCosineLR,
    WarmupDecayLR,
)
from lockstep.compat.deepspeed.optimizers import (
    DummyOptim,
    DummyScheduler,
    build_optimizer,
    filled,
    optimizer_class,
)
from lockstep.config.options import Options
from lockstep.config.readers import OptimizerConfig, SchedulerConfig
from lockstep.config.values import parse_integer, repr_short, suggestion
from lockstep.errors import ConfigError, UsageError
from lockstep.train.scheduler import SCHEDULERS


def check_described(
    optimizer: OptimizerConfig | None = None, scheduler: SchedulerConfig | None = None
) -> None:
    """Refuse an optimizer or a schedule that a run would refuse by its name.

    Raises:
        ConfigError: it is not available here.
    """
    if optimizer is not None:
        optimizer_class(optimizer)
    if scheduler is not None and scheduler.type not in SCHEDULES:
        _torch_class(scheduler.type)


def build_described(objects: tuple[object, ...], options: Options, world_size: int) -> tuple[object, ...]:
    """Return the objects, with optimizers and schedulers that ``options`` describe in place of ``Dummy...`` ones.

    Raises:
        UsageError: a real optimizer or scheduler beside a description of one.
        ConfigError: a description is wrong or incomplete.
    """
    for name, described, kind, dummy in (
        ("optimizer", options.optimizer, Optimizer, "DummyOptim(model.parameters())"),
        ("scheduler", options.scheduler, SCHEDULERS, "DummyScheduler(optimizer)"),
    ):
        found = [type(item).__name__ for item in objects if isinstance(item, kind)]
        if described is not None and found and not getattr(described, "replaces", False):
            raise UsageError(
                f"prepare got {found[0]}, but the DeepSpeed configuration describes a {described.type} as {name} "
                f"too. Pass a {dummy} to prepare, or drop the section '{name}'."
            )
    placeholders = {id(item): item for item in objects if isinstance(item, DummyOptim)}
    if options.optimizer is not None and options.optimizer.replaces:
        placeholders |= {id(item): _parameters_of(item) for item in objects if isinstance(item, Optimizer)}
    built: dict[int, Any] = {
        key: build_optimizer(options.optimizer, item) for key, item in placeholders.items()
    }
    steps_per_call = 1 if options.loaders.split_batches else world_size
    for item in objects:
        if isinstance(item, DummyScheduler):
            of = built.get(id(item.optimizer), getattr(item.optimizer, "optimizer", item.optimizer))
            built[id(item)] = build_scheduler(options.scheduler, item, of, steps_per_call)
    return tuple(built.get(id(item), item) for item in objects)


def _parameters_of(optimizer: Optimizer) -> DummyOptim:
    """Return its parameters in one group, as DeepSpeed is given them by Trainer."""
    return DummyOptim([parameter for group in optimizer.param_groups for parameter in group["params"]])


# They need functions, other schedules or a metric, which a file cannot hold.
_NOT_FROM_A_FILE = (
    "LRScheduler",
    "_LRScheduler",
    "LambdaLR",
    "MultiplicativeLR",
    "SequentialLR",
    "ChainedScheduler",
    "ReduceLROnPlateau",
)


REPLACED = {"OneCycle": "OneCycleLR", "LRRangeTest": "LinearLR"}
"""Schedules of DeepSpeed that are not offered -> what of torch does nearly the same."""


def build_scheduler(
    config: SchedulerConfig | None, dummy: DummyScheduler, optimizer: Optimizer, steps_per_call: int = 1
) -> LRScheduler:
    """Return the schedule of the file for ``optimizer``; it counts steps of the optimizer on all processes together.

    The result has ``counts_optimizer_steps = True``: a prepared scheduler advances it once in each step.
    ``warmup_max_lr: "auto"`` is each parameter group's own learning rate.

    Args:
        steps_per_call: how many steps of the script's count are one step of the optimizer: the number of
            processes, or 1 with ``split_batches``. ``dummy.total_num_steps`` is divided by it, rounded
            up; ``dummy.warmup_num_steps`` is not. Both are as in Accelerate with DeepSpeed.

    Raises:
        ConfigError: neither or both of a section and a callable; an unknown schedule; an unknown,
            missing or unusable parameter.
        UsageError: the callable returned no scheduler.
    """
    make = dummy.lr_scheduler_callable
    if (config is None) == (make is None):
        given = "neither" if config is None else "both"
        raise ConfigError(
            "The schedule comes from the section 'scheduler' of the configuration or from DummyScheduler(..., "
            f"lr_scheduler_callable=...), but {given} of them is there. Give exactly one."
        )
    scheduler = (
        _called(make, optimizer) if config is None else _from_config(config, dummy, optimizer, steps_per_call)
    )
    if not isinstance(scheduler, ScheduledLR):
        scheduler.counts_optimizer_steps = True
    return scheduler


def _called(make: Any, optimizer: Optimizer) -> Any:
    scheduler = make(optimizer)
    if not isinstance(scheduler, LRScheduler):
        raise UsageError(
            f"lr_scheduler_callable returned a {type(scheduler).__name__}. Return a scheduler of "
            "torch.optim.lr_scheduler for the optimizer that it gets."
        )
    return scheduler


def _from_config(
    config: SchedulerConfig, dummy: DummyScheduler, optimizer: Optimizer, steps_per_call: int
) -> Any:
    if config.type not in SCHEDULES:
        return _torch_scheduler(config, dummy, optimizer)
    warmup_steps = parse_integer(dummy.warmup_num_steps, "DummyScheduler.warmup_num_steps", 0)
    absent = dict(dummy.kwargs)
    auto = {
        **dummy.kwargs,
        # The placeholder's default is 0, which is refused in a file.
        "warmup_num_steps": max(1, warmup_steps),
        "warmup_min_lr": 0.0,
        "warmup_max_lr": [float(group["lr"]) for group in optimizer.param_groups],
    }
    if dummy.total_num_steps is not None:
        total = parse_integer(dummy.total_num_steps, "DummyScheduler.total_num_steps", 1)
        auto["total_num_steps"] = math.ceil(total / steps_per_call)
        if config.type in ("WarmupDecayLR", "WarmupCosineLR"):
            absent["total_num_steps"] = auto["total_num_steps"]
    params = filled(config.params, absent, auto, "scheduler", "DummyScheduler")
    schedule = parse_schedule(config.type, params, len(optimizer.param_groups))
    if isinstance(schedule, (WarmupDecayLR, WarmupCosineLR)):
        _warn_of_endless_warmup(schedule)
    return ScheduledLR(optimizer, schedule)


def _warn_of_endless_warmup(schedule: WarmupDecayLR | WarmupCosineLR) -> None:
    if schedule.total_num_steps < schedule.warmup_num_steps:
        warnings.warn(
            f"The schedule {type(schedule).__name__} is {schedule.total_num_steps} optimizer steps long, and its "
            f"warm-up {schedule.warmup_num_steps}, so training ends inside the warm-up. Set a smaller "
            "warmup_num_steps.",
            stacklevel=2,
        )


def _torch_class(name: str) -> Any:
    if name in REPLACED:
        raise ConfigError(
            f"The schedule {name} of DeepSpeed is not available. Name torch's {REPLACED[name]} with its parameters "
            "instead."
        )
    classes = {
        key: value
        for key, value in vars(lr_scheduler).items()
        if inspect.isclass(value) and issubclass(value, LRScheduler) and key not in _NOT_FROM_A_FILE
    }
    if name not in classes:
        names = [*SCHEDULES, *sorted(key for key in classes if not key.startswith("_"))]
        raise ConfigError(
            f"The schedule {repr_short(name)} is not available from a file.{suggestion(name, names)} Use one of "
            f"{', '.join(names)}, or pass lr_scheduler_callable to DummyScheduler."
        )
    return classes[name]


def _torch_scheduler(config: SchedulerConfig, dummy: DummyScheduler, optimizer: Optimizer) -> object:
    kind = _torch_class(config.type)
    params = filled(config.params, dummy.kwargs, dummy.kwargs, "scheduler", "DummyScheduler")
    signature = inspect.signature(kind).parameters
    known = {name: signature[name] for name in signature if name not in ("optimizer", "last_epoch")}
    refuse_unknown(params, known, f"schedule {config.type}")
    try:
        return kind(optimizer, **params)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"torch refuses the schedule {config.type} with {repr_short(params, 200)}: {error}. Change "
            "scheduler.params in the file."
        ) from error
