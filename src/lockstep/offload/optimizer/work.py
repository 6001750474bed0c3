"""What the threads of a step do with one item: gather, compute, and put away."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TypeGuard

import torch
from torch.optim import Optimizer

from lockstep.comm.dtensor import local
from lockstep.comm.tree import StateDict
from lockstep.errors import UsageError
from lockstep.offload.files.direct import FreedMemory
from lockstep.offload.files.pages import is_mostly_present
from lockstep.offload.optimizer import unscaled
from lockstep.offload.optimizer.device import HostSide, take_kept
from lockstep.offload.optimizer.kernel import KernelEntry, step_some
from lockstep.offload.optimizer.states import (
    StateFiles,
    StepRegion,
    in_order,
    is_large,
    like_parameter,
    region_to_move,
)
from lockstep.offload.optimizer.threads import VALUE, EarlyRead, StepItem, StepRun
from lockstep.torch_internals import tensors as torch_tensors

GRADIENT = "gradient"


class StepWork:
    """Steps items of an optimizer where their parameters, gradients and state are.

    Args:
        optimizer: Whose state is stepped.
        files: Where large state is kept, if not in memory.
        host: Of parameters that are on a device.
    """

    def __init__(self, optimizer: Optimizer, files: StateFiles | None, host: HostSide | None) -> None:
        self._optimizer = optimizer
        self.files = files
        self.host = host
        self._freed = FreedMemory()

    @property
    def _state(self) -> MutableMapping[torch.Tensor, StateDict]:
        state = vars(self._optimizer)["state"]
        return state

    def entry(self, parameter: torch.Tensor, group: int) -> KernelEntry:
        assert parameter.grad is not None
        scale = unscaled.scale_of(parameter.grad)
        gradient = unscaled.as_in_file(local(parameter.grad))
        if gradient.layout != torch.strided:
            raise UsageError(
                f"A parameter of shape {tuple(parameter.shape)} has a sparse gradient, which an offloaded step "
                "cannot use. Set sparse=False in its embedding, or do not offload its optimizer."
            )
        # ``data`` has a version counter of its own: the worker's writes are announced here instead, once.
        value = local(parameter.detach()).data
        if (host := self._host_of(parameter)) is not None:
            value = host.master(parameter)
        version = torch_tensors.version(gradient)
        return KernelEntry(parameter, group, value, gradient.data, gradient, version, scale)

    def _host_of(self, parameter: torch.Tensor) -> HostSide | None:
        return self.host if self.host is not None and self.host.serves(parameter) else None

    def announce(self, entry: KernelEntry) -> None:
        """Say that a parameter is about to change. Its state is made if there is none."""
        # In the order in which the optimizer itself would make it.
        self._state.setdefault(entry.parameter, {})
        torch.autograd.graph.increment_version(entry.parameter)
        if (host := self._host_of(entry.parameter)) is not None:
            host.note_version(entry.parameter)

    def stage(self, item: StepItem) -> None:
        """Note what is to be moved for an item, if it lies in files."""
        is_awaited = item.begin()
        for index, entry in enumerate(item.entries):
            host = self._host_of(entry.parameter)
            item.fetched.append(
                host.fetch(entry.parameter, entry.watched, entry.gradient) if host is not None else None
            )
            value = region_to_move(entry.value, changes=True)
            if value is not None and self._is_stepped_in_place(entry.value, is_awaited):
                item.in_place.append(value)
            elif value is not None:
                item.others[index, VALUE] = value
            if host is None and (gradient := region_to_move(entry.gradient, changes=False)) is not None:
                item.others[index, GRADIENT] = gradient
            for name, region in self._state_regions(entry.parameter):
                item.states[index, name] = region

    def _is_stepped_in_place(self, value: torch.Tensor, is_awaited: bool) -> bool:
        """Return parameters of which backward has left the pages, or of which somebody brings them for the forward."""
        return self.host is None and (is_awaited or is_mostly_present(value))

    def _state_regions(self, parameter: torch.Tensor) -> Iterator[tuple[str, StepRegion]]:
        for name, value in self._state.get(parameter, {}).items():
            if is_large(value, parameter):
                region = region_to_move(local(value), changes=True)
                if region is not None:
                    yield f"state {name}", region

    def early_read(self, item: StepItem) -> EarlyRead | None:
        """Return what can be read for the next step of an item, which has been stepped."""
        regions = in_order(region for p in item.parameters for _, region in self._state_regions(p))
        return EarlyRead(item, regions) if regions and all(r.file.is_direct for r in regions) else None

    def compute(self, run: StepRun, item: StepItem, buffer: torch.Tensor) -> None:
        def from_buffer(index: int, role: str, tensor: torch.Tensor) -> torch.Tensor:
            region = item.others.get((index, role)) or item.states.get((index, role))
            return region.within(buffer) if region is not None else tensor

        values, gradients, states = [], [], []
        for index, entry in enumerate(item.entries):
            values.append(from_buffer(index, VALUE, entry.value))
            fetched = item.fetched[index]
            if fetched is not None and self.host is not None:
                gradients.append(self.host.arrived(fetched))
            else:
                gradients.append(from_buffer(index, GRADIENT, entry.gradient))
            # Scaled in the buffer, not in the file.
            if entry.scale is not None:
                entry.scale.apply(gradients[-1:])
            states.append(
                {
                    name: from_buffer(index, f"state {name}", local(value))
                    if isinstance(value, torch.Tensor)
                    else value
                    for name, value in self._state[entry.parameter].items()
                }
            )
        given = [dict(state) for state in states]
        after = step_some(run.settings, item.entries, values, gradients, states)
        for entry, before, now in zip(item.entries, given, after, strict=True):
            self._keep(entry.parameter, before, now)
        if self.files is not None:
            # What the kernel needs on the way, and state that is new.
            self._freed.add(4 * sum(value.numel() * value.element_size() for value in values))
        if self.host is not None:
            self._send(self.host, item, values)

    def _send(self, host: HostSide, item: StepItem, values: list[torch.Tensor]) -> None:
        """Send new values to the device, and free the memory of gradients that came from there."""
        for entry, fetched, value in zip(item.entries, item.fetched, values, strict=True):
            if fetched is not None:
                host.release(fetched)
                host.publish(entry.parameter, value)
        item.published = host.copies.copied()
        if item.others or item.states:
            # The buffer that holds the values will hold others.
            host.copies.wait(item.published)

    def _keep(self, parameter: torch.Tensor, before: dict[str, object], now: dict[str, object]) -> None:
        """Take over what an optimizer made of a parameter's state."""
        if not now:
            del self._state[parameter]
            return
        own = self._state[parameter]
        for name, value in now.items():
            old = before.get(name)
            if name in before and value is old:
                # Changed in place.
                continue
            if isinstance(old, torch.Tensor) and old is not own[name] and _fits(value, old):
                # The old one is where the state is kept, or from where it is written back.
                old.copy_(value)
            else:
                own[name] = like_parameter(value, parameter) if isinstance(value, torch.Tensor) else value
        if self.files is not None:
            self.files.adopt(parameter, own)

    def adopt_state(self) -> None:
        """Bring state to the host or into its file, if it is not there: state that was loaded, or made early."""
        parameters = (p for group in self._optimizer.param_groups for p in group["params"])
        states = [(p, self._state[p]) for p in parameters if p in self._state]
        # First copy what lies where another's state will be, of all; then write.
        for parameter, own in states:
            if self._host_of(parameter) is not None:
                take_kept(parameter, own)
            if self.files is not None:
                self.files.separate(parameter, own)
        if self.files is not None:
            for parameter, own in states:
                self.files.adopt(parameter, own)


def _fits(value: object, before: torch.Tensor) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (before.shape, before.dtype)
