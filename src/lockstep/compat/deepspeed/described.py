"""Stand-ins for what a DeepSpeed configuration describes, replaced by the real objects."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from lockstep.compat.deepspeed.optimizers import DummyOptim, DummyScheduler, build_optimizer
from lockstep.compat.deepspeed.schedulers import build_scheduler
from lockstep.config.options import Options
from lockstep.errors import UsageError
from lockstep.train.scheduler import SCHEDULERS


def build_described(objects: tuple[object, ...], options: Options, world_size: int) -> tuple[object, ...]:
    """The objects, with optimizers and schedulers that ``options`` describe in place of ``Dummy...`` ones.

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
    """Its parameters in one group, as DeepSpeed is given them by Trainer."""
    return DummyOptim([parameter for group in optimizer.param_groups for parameter in group["params"]])
