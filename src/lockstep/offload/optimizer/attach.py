"""An optimizer whose ``step`` goes through an ``OffloadedStep``, and which else is what it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from lockstep.comm.tree import StateDict
from lockstep.errors import UsageError
from lockstep.model.changes import UncopiedHook
from lockstep.offload.copies import Copies
from lockstep.offload.optimizer.device import keep_on_host
from lockstep.offload.optimizer.offloaded import OffloadedStep
from lockstep.offload.weights.groups import WeightGroup
from lockstep.torch_internals import optim as torch_optim

_CPU = torch.device("cpu")

HOOK_READS_NOTHING = "reads_no_parameter"
"""A step post hook with this attribute true is called before the step is over; others make ``step`` wait."""


def offload_step(
    optimizer: Optimizer,
    groups: Sequence[WeightGroup],
    folder: Path | None = None,
    device: torch.device = _CPU,
    copies: Copies | None = None,
) -> OffloadedStep:
    """Let ``optimizer.step()`` return at once and step group by group in the background; ``close`` undoes it.

    The optimizer stays the object it is; its class becomes a subclass of the same name. What reads its state, or
    reads or loads that of the groups' modules, waits for the step.

    Raises:
        UsageError: ``optimizer.step`` was replaced; or see ``OffloadedStep``.
        OffloadError: See ``OffloadedStep``.
    """
    if isinstance(optimizer, _Offloaded):
        raise UsageError(
            f"The step of this {type(optimizer).__name__} is offloaded already. Prepare each optimizer once."
        )
    _refuse_replaced_step(optimizer)
    offloaded = OffloadedStep(optimizer, groups, folder, device, copies)
    wait, before_load = WaitHook(offloaded.finish), WaitHook(offloaded.before_load)
    modules = {id(module): module for group in groups for root in group.modules for module in root.modules()}
    for module in modules.values():
        offloaded.at_close(module.register_state_dict_pre_hook(wait).remove)
        offloaded.at_close(module.register_load_state_dict_pre_hook(before_load).remove)
    offloaded.at_close(partial(_restore, optimizer, type(optimizer)))
    # A scheduler's note that the optimizer stepped, which ``_Offloaded.step`` takes itself.
    vars(optimizer).pop("step", None)
    optimizer.__class__ = _offloaded_class(type(optimizer))
    vars(optimizer)["_offloaded_step"] = offloaded
    return offloaded


def _restore(optimizer: Optimizer, optimizer_class: type[Optimizer]) -> None:
    if vars(optimizer).pop("_offloaded_step", None) is not None:
        optimizer.__class__ = optimizer_class


def _refuse_replaced_step(optimizer: Optimizer) -> None:
    replaced = vars(optimizer).get("step")
    if replaced is not None and not torch_optim.is_wrapped_by_scheduler(replaced):
        raise UsageError(
            f"The step of this {type(optimizer).__name__} was replaced by {replaced}, which an offloaded step "
            "would not call. Use optimizer.register_step_pre_hook or register_step_post_hook instead."
        )


class WaitHook(UncopiedHook):
    """A hook of a model that calls ``wait`` with nothing. In a copy of the model (deepcopy, pickle) it does nothing."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def __call__(self, *_: object) -> None:
        self._wait()


class _Offloaded(Optimizer):
    """Mixed into the class of an optimizer whose step is offloaded."""

    _offloaded_step: OffloadedStep

    def step(self, closure: Callable[[], object] | None = None) -> Any:
        # Hooks, too, are to see the parameters after the step before.
        self._offloaded_step.finish()
        torch_optim.note_step(self)
        return _hooked_step(self, closure)

    # A property goes before the entry of the same name in the instance's dict, where torch keeps the state.
    @property
    def state(self) -> Any:
        self._offloaded_step.finish()
        return vars(self)["state"]

    @state.setter
    def state(self, state: object) -> None:
        self._offloaded_step.finish()
        vars(self)["state"] = state
        self._offloaded_step.after_load()

    def state_dict(self) -> StateDict:
        self._offloaded_step.finish()
        self._offloaded_step.refuse_if_broken()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self._offloaded_step.before_load()
        super().load_state_dict(
            keep_on_host(state_dict) if self._offloaded_step.steps_on_host else state_dict
        )
        self._offloaded_step.after_load()

    def zero_grad(self, set_to_none: bool = True) -> None:
        # Zeros are written into gradients that the step may still read.
        if not set_to_none:
            self._offloaded_step.finish()
        super().zero_grad(set_to_none)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            f"A {type(self).__name__} whose step is offloaded cannot be copied or pickled: its state may be in "
            "files of this process. Save optimizer.state_dict() instead."
        )


# Schedulers put a note around a step that lacks this mark; see ``step``.
torch_optim.take_for_wrapped(_Offloaded.step)


def _begin(self: _Offloaded, closure: Callable[[], object] | None = None) -> object:
    loss = self._offloaded_step.step(closure)
    if _has_hook_that_reads(self):
        self._offloaded_step.finish()
    return loss


_hooked_step = torch_optim.with_step_hooks(_begin)


def _has_hook_that_reads(optimizer: Optimizer) -> bool:
    hooks = torch_optim.step_post_hooks_of(optimizer)
    return not all(getattr(hook, HOOK_READS_NOTHING, False) for hook in hooks)


def _offloaded_class(optimizer_class: type[Optimizer]) -> type[Optimizer]:
    names = {"__module__": optimizer_class.__module__, "__doc__": optimizer_class.__doc__}
    return type(optimizer_class.__name__, (_Offloaded, optimizer_class), names)
