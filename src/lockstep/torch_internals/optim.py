"""Optimizers, schedulers and the gradient scaler."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.torch_internals.versions import expect, probed

Listener = TypeVar("Listener")
GROWTH_TRACKER = "_growth_tracker"
"""Relies on: the key of a scaler's state under which the number of good steps since the last change stands."""


def scale_in_place(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all by a 0-d tensor of theirs. Relies on: ``_foreach_mul_`` takes one without waiting for it."""
    torch._foreach_mul_(tensors, factor)


def stepped_by(optimizer: Optimizer) -> set[int]:
    """Return the parameters that the optimizer steps on, by ``id``."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def note_step(optimizer: Any) -> None:
    """Relies on: schedulers warn unless ``_opt_called`` says that their optimizer has stepped before them."""
    optimizer._opt_called = True


def is_wrapped_by_scheduler(step: object) -> bool:
    """Return whether a scheduler put its note around this ``step``. Relies on: it then has ``_wrapped_by_lr_sched``."""
    return hasattr(step, "_wrapped_by_lr_sched")


def take_for_wrapped(step: Any) -> None:
    """Let schedulers leave this ``step`` as it is, as one that calls ``note_step`` itself."""
    step._wrapped_by_lr_sched = True
    # ``profile_hook_step`` wraps only a step that lacks this mark.
    step.hooked = True


def step_without_hooks(cls: Any) -> Callable[..., object]:
    """Return a class's ``step`` as it was written. Relies on: hooks around it have ``hooked`` and ``__wrapped__``."""
    step = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def complete_optimizer(optimizer: Optimizer) -> None:
    """Give an optimizer whose class does not call ``super().__init__`` what torch gives one that was unpickled.

    Relies on: ``__setstate__`` adds the dictionaries of hooks where they are missing.
    """
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        Optimizer.__setstate__(optimizer, {})


FILLS_LISTS = "_init_group"
"""The attribute of an optimizer by which ``step_on_parts`` works; it belongs to this one, not to what copies it."""


def step_on_parts(optimizer: Any, parts: Callable[[list[list[Tensor]]], list[list[Tensor]]]) -> None:
    """Let Adam or AdamW step on other tensors than it has: ``parts`` of its lists, which share memory with these.

    The lists are the parameters, then their gradients and each kind of state.

    Relies on: ``step`` has each group's lists filled by ``_init_group``, and does nothing with them but step.
    """
    # Parts of parts would be stepped on otherwise.
    if FILLS_LISTS in vars(optimizer):
        return
    fill = optimizer._init_group

    def fill_with_parts(group: dict[str, object], *lists: list[Tensor]) -> object:
        result = fill(group, *lists)
        if not group.get("differentiable"):
            for tensors, those in zip(lists, parts(list(lists)), strict=True):
                # In place: ``step`` goes on with these very lists.
                tensors[:] = those
        return result

    optimizer._init_group = fill_with_parts


def with_step_hooks(step: Callable[..., object]) -> Callable[..., object]:
    """Return ``step`` with the optimizer's hooks before and after it. Relies on: ``Optimizer.profile_hook_step``."""
    return Optimizer.profile_hook_step(step)


def takes_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether it was made by torch's own ``__init__``. Relies on: hooks are kept in
    ``_optimizer_step_pre_hooks``."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def step_post_hooks_of(optimizer: Optimizer) -> list[Callable[..., object]]:
    """Return its own and those of all optimizers.

    Relies on: ``_optimizer_step_post_hooks``, and ``_global_optimizer_post_hooks`` of a module that is hidden by the
    class of the same name.
    """
    everywhere = import_module("torch.optim.optimizer")._global_optimizer_post_hooks
    return [*optimizer._optimizer_step_post_hooks.values(), *everywhere.values()]


class StepListeners(Generic[Listener]):
    """Objects that hear of each step of any optimizer, as long as they live.

    torch's own hook stays. The last reference to a listener may go in a garbage collection, which may run while torch
    goes through its hooks, of which none can be removed then.

    Args:
        register: The function of torch that registers a hook for all optimizers.
        tell: Called with a listener and the optimizer.
    """

    reads_no_parameter = True

    def __init__(
        self, register: Callable[[Any], object], tell: Callable[[Listener, Optimizer], object]
    ) -> None:
        self._register, self._tell = register, tell
        self._is_registered = False
        self._listeners: weakref.WeakSet[Listener] = weakref.WeakSet()

    def add(self, listener: Listener) -> None:
        """Tell ``listener`` from now on."""
        if not self._is_registered:
            self._is_registered = True
            self._register(self)
        self._listeners.add(listener)

    def remove(self, listener: Listener) -> None:
        """Stop telling it, if it was told."""
        self._listeners.discard(listener)

    def __call__(self, optimizer: Optimizer, *_: object) -> None:
        for listener in list(self._listeners):
            self._tell(listener, optimizer)


def counts_steps(scheduler: object) -> bool:
    """Relies on: torch's schedulers count their steps in ``_step_count``; others need not."""
    return hasattr(scheduler, "_step_count")


def count_step(scheduler: Any) -> None:
    """Count one more step without making it: torch warns where it has not one more than the optimizer made."""
    scheduler._step_count += 1


def scale_of(scaler: torch.amp.GradScaler) -> Tensor | None:
    """Return the loss scale, 0-d on its device; None before the first use. Relies on: ``_get_scale_async``."""
    return scaler._get_scale_async()


def forget_unscaled(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    """Let a scaler unscale this optimizer's next gradients as if it had never unscaled any.

    Relies on: ``_per_optimizer_states`` makes the entry of an optimizer, by its ``id``, when it is first asked for.
    """
    scaler._per_optimizer_states.pop(id(optimizer), None)


class HookedGradScaler(torch.amp.GradScaler):
    """A scaler that asks ``unscale_gradients`` to unscale.

    Relies on: ``_unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)`` looks at nothing of the optimizer but
    the gradients of its groups, and gives a flag for each device: 1.0 where one is not finite.
    """

    def unscale_gradients(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale gradients as torch does; to be overridden."""
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return self.unscale_gradients(optimizer, inv_scale, found_inf, allow_fp16)


@probed("optimizer", "counts steps, scales gradients and calls hooks")
def probe() -> None:
    """Scale a gradient, and look at an optimizer with a schedule."""
    leaf = torch.ones(1, requires_grad=True)
    leaf.grad = torch.full((1,), 8.0)
    optimizer = torch.optim.SGD([leaf], lr=1.0)
    expect(takes_step_hooks(optimizer) and step_post_hooks_of(optimizer) is not None, "hooks of a step")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    expect(is_wrapped_by_scheduler(optimizer.step), "a step that a scheduler knows of")
    expect(counts_steps(scheduler), "a scheduler that counts its steps")
    expect(step_without_hooks(torch.optim.SGD) is not torch.optim.SGD.step, "a step with hooks around it")
    scaler = HookedGradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    scale = scale_of(scaler)
    expect(scale is not None and GROWTH_TRACKER in scaler.state_dict(), "the loss scale")
    for gradient in (8.0, 4.0):
        leaf.grad = torch.full((1,), gradient)
        scaler.unscale_(optimizer)
        expect(leaf.grad.item() == gradient / 4, "gradients that are unscaled again")
        forget_unscaled(scaler, optimizer)
