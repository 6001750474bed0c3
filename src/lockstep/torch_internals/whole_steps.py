"""What steps on whole parameters need: memory and versions of tensors, notes of schedulers, names of operations."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.torch_internals.versions import expect, probed


def storage_key(tensor: torch.Tensor) -> int:
    """The same for tensors that share memory. Relies on: ``_cdata`` of a storage is the address of torch's record."""
    return int(tensor.untyped_storage()._cdata)


def version(tensor: torch.Tensor) -> int:
    """Relies on: ``_version`` grows with every write in place."""
    return int(tensor._version)


def note_step(optimizer: Any) -> None:
    """Relies on: schedulers warn unless ``_opt_called`` says that their optimizer has stepped before them."""
    optimizer._opt_called = True


def is_noted_by_scheduler(step: Any) -> bool:
    """Whether a scheduler put its note around this ``step``. Relies on: it then has ``_wrapped_by_lr_sched``."""
    return hasattr(step, "_wrapped_by_lr_sched")


def take_for_noted(step: Any) -> None:
    """Let schedulers and torch's hooks leave this ``step`` as it is. Relies on: that mark, and ``hooked``."""
    step._wrapped_by_lr_sched = True
    step.hooked = True


def step_without_hooks(cls: Any) -> Any:
    """A class's ``step`` as it was written. Relies on: hooks around it have ``hooked`` and ``__wrapped__``."""
    step = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def operation_name(operation: Any) -> str:
    """Such as "add_". Relies on: ``_schema.name`` of an operation is that after its namespace."""
    return str(operation._schema.name).removeprefix("aten::")


def complete_optimizer(optimizer: Optimizer) -> None:
    """Give an optimizer whose class does not call ``super().__init__`` what torch gives one that was unpickled.

    Relies on: ``__setstate__`` adds the dictionaries of hooks where they are missing.
    """
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        Optimizer.__setstate__(optimizer, {})


@probed("Optimizer", "calls hooks and tells schedulers of steps")
def probe() -> None:
    """A schedule of plain SGD, a view, and an operation."""
    leaf = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([leaf], lr=1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    expect(is_noted_by_scheduler(optimizer.step), "a step that a scheduler knows of")
    expect(step_without_hooks(torch.optim.SGD) is not torch.optim.SGD.step, "a step with hooks around it")
    view = leaf.detach()[1:]
    expect(storage_key(view) == storage_key(leaf) != storage_key(torch.ones(1)), "the memory of a view")
    before = version(view)
    view.add_(1)
    expect(version(view) == before + 1, "the version after a write")
    expect(operation_name(torch.ops.aten.add_.Tensor) == "add_", "the name of an operation")
    bare = object.__new__(torch.optim.SGD)
    bare.defaults = {}
    complete_optimizer(bare)
    expect(bare.register_step_post_hook(lambda *_: None) is not None, "hooks of an optimizer without any")
