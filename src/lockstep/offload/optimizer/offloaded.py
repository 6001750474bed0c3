"""The optimizer's step, block by block in the background, while the next forward runs.

``optimizer.step()`` returns at once. A worker steps the groups in the order of the forward, and the forward of a group
waits for the step of that group. State that lives in files is read before and written after each group, so that host
memory holds that of three groups at most. Every kernel is the user's optimizer's own, so that results are the same to
the last bit.

Reference: Rajbhandari et al., ZeRO-Infinity, SC 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.errors import OffloadError, UsageError
from lockstep.offload.copies import Copies, copies_of
from lockstep.offload.files.direct import OffloadFile
from lockstep.offload.optimizer.device import HostSide
from lockstep.offload.optimizer.kernel import KernelEntry, settings_of, why_not_separable
from lockstep.offload.optimizer.states import StateFiles
from lockstep.offload.optimizer.threads import BUFFERS, StepItem, StepRun, StepThreads
from lockstep.offload.optimizer.unscaled import is_read_until
from lockstep.offload.optimizer.work import StepWork
from lockstep.offload.weights.groups import WeightGroup

_CPU = torch.device("cpu")
_STRAYS_AT_ONCE = 64 << 20


class OffloadedStep:
    """Steps an optimizer group by group in the background. A ``GroupListener``; see ``offload_step``.

    Parameters that no group has are stepped before ``step`` returns, as nobody says when they are needed. So is the
    whole of an optimizer that does not treat every parameter by itself.

    Args:
        optimizer: Whose parameters and state are stepped.
        groups: In the order of the forward; several may share a parameter.
        folder: Where state as large as its parameter is kept; None keeps it in host memory.
        device: Where parameters are; those on another device than the host's are stepped on the host.
        copies: To and from ``device``; by default none for the host's own.

    Raises:
        UsageError: State is to be kept in ``folder``, but the optimizer looks at parameters together.
        OffloadError: There is too little space in ``folder``, or it cannot be written to.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Sequence[WeightGroup],
        folder: Path | None = None,
        device: torch.device = _CPU,
        copies: Copies | None = None,
    ) -> None:
        if copies is None and device.type != "cpu":
            copies = copies_of(device)
        self._optimizer = optimizer
        self._class = type(optimizer)
        self._groups = list(groups)
        self._groups_of: dict[int, list[WeightGroup]] = {}
        for group in groups:
            for tensor in group.tensors.values():
                self._groups_of.setdefault(id(tensor), []).append(group)
        why = why_not_separable(self._class, optimizer.param_groups)
        self.is_blockwise = why is None
        self._check(why, folder, copies is not None)
        files = StateFiles(folder, self._class, optimizer.param_groups) if folder is not None else None
        host = HostSide(self._parameters(), device, folder, copies) if copies is not None else None
        self._work = StepWork(optimizer, files, host)
        self._threads = StepThreads(self._work.stage, self._work.compute)
        self._undo = ExitStack()
        self._undo.callback(self._threads.close)
        if host is not None:
            self._undo.callback(host.close)
        self._run: StepRun | None = None
        # Whose state may be read early for the next one.
        self._last: StepRun | None = None
        self._waits_for: dict[int, list[StepItem]] = {}
        self._broken: OffloadError | None = None
        self._work.adopt_state()

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (p for group in self._optimizer.param_groups for p in group["params"])

    def _check(self, why: str | None, folder: Path | None, on_host: bool) -> None:
        wishes = {
            "keep its state on disk": folder is not None,
            "step it in host memory": on_host,
        }
        wanted = next((wish for wish, wished in wishes.items() if wished), None)
        if wanted is not None and why is not None:
            raise UsageError(
                f"Cannot {wanted}: {why}. Use one of torch.optim, such as AdamW, or offload to host memory."
            )

    def _files(self) -> Iterator[OffloadFile]:
        return (f for part in (self._work.files, self._work.host) if part is not None for f in part.files)

    @property
    def bytes_read(self) -> int:
        """Of optimizer state and the host's copies of parameters, from disk, so far."""
        return sum(file.bytes_read for file in self._files())

    @property
    def bytes_written(self) -> int:
        """Of optimizer state and the host's copies of parameters, to disk, so far."""
        return sum(file.bytes_written for file in self._files())

    def step(self, closure: Callable[[], object] | None = None) -> object:
        """Begin a step with the gradients and settings of now; returns what ``closure`` does.

        Raises:
            OffloadError: The step before failed.
            UsageError: A gradient is sparse.
        """
        self.finish()
        self.refuse_if_broken()
        if not self.is_blockwise:
            # Without the hooks around it: this call is made within them.
            step: Any = self._class.step
            return step.__wrapped__(self._optimizer, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._begin(self._entries())
        return loss

    def _entries(self) -> list[KernelEntry]:
        entries = []
        for index, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    entries.append(self._work.entry(parameter, index))
        return entries

    def _begin(self, entries: list[KernelEntry]) -> None:
        if not entries:
            return
        # Versions change here, in the thread that calls ``step``, and not when the worker writes.
        for entry in entries:
            self._work.announce(entry)
        if self._work.host is not None:
            self._work.host.begin()
        strays, items = self._items(entries)
        self._run = run = StepRun(strays + list(items.values()), settings_of(self._optimizer, self._class))
        self._waits_for = {}
        for item in run.items:
            for parameter in item.parameters:
                if parameter.grad is not None:
                    is_read_until(parameter.grad, item.shown)
        for entry in entries:
            groups = self._groups_of.get(id(entry.parameter), [])
            for group in groups:
                waited = self._waits_for.setdefault(id(group), [])
                # What several groups share is stepped with the first of them, for which the others wait.
                if (item := items[id(groups[0])]) not in waited:
                    waited.append(item)
        self._forget_changed()
        self._last = run
        self._threads.start(run)
        self._wait(strays)

    def _read_early(self) -> None:
        """Begin to read the state of the groups that are stepped first, while backward computes."""
        last = self._last
        if self._work.files is None or last is None or not last.over.is_set() or self._threads.early:
            return
        # Up to the first that cannot be read: early reads are used up item by item.
        reads = (self._work.early_read(item) for item in last.items[:BUFFERS])
        self._threads.read_early([read for read in takewhile(bool, reads) if read is not None])

    def _forget_changed(self) -> None:
        """Do not use what was read early, if the state was changed since."""
        if not all(early.is_unchanged() for early in self._threads.early):
            self._threads.forget_early()

    def _items(self, entries: list[KernelEntry]) -> tuple[list[StepItem], dict[int, StepItem]]:
        """Return parameters without a group, a few at a time, and the others by their (first) group, in order."""
        strays: list[StepItem] = []
        room = 0
        by_group: dict[int, list[KernelEntry]] = {}
        for entry in entries:
            if groups := self._groups_of.get(id(entry.parameter)):
                by_group.setdefault(id(groups[0]), []).append(entry)
                continue
            nbytes = entry.value.numel() * entry.value.element_size()
            if not strays or room < nbytes:
                strays.append(StepItem(f"a parameter of shape {tuple(entry.parameter.shape)}", []))
                room = _STRAYS_AT_ONCE
            strays[-1].entries.append(entry)
            room -= nbytes
        ordered = [group for group in self._groups if id(group) in by_group]
        return strays, {id(group): StepItem(group.name, by_group[id(group)]) for group in ordered}

    def _wait(self, items: Sequence[StepItem]) -> None:
        for item in items:
            item.shown.wait()
        if any(not item.succeeded for item in items):
            self._raise_error()
        if self._work.host is not None:
            for item in items:
                if item.published is not None:
                    self._work.host.compute_after(item.published)

    def _raise_error(self) -> None:
        """Raise what the worker met, once."""
        if self._run is not None and self._run.error is not None and self._broken is None:
            self._broken = self._run.describe_error()
            raise self._broken from self._run.error

    def finish(self) -> None:
        """Wait until all groups are stepped.

        Raises:
            OffloadError: The step failed.
        """
        if self._run is not None:
            self._run.over.wait()
            self._wait(self._run.items)
            # An error of what was written after the values were shown.
            self._raise_error()
            self._run = None
            self._waits_for = {}

    def refuse_if_broken(self) -> None:
        """Raise again what made a step fail, until state is loaded."""
        if self._broken is not None:
            raise OffloadError(str(self._broken)) from self._broken

    def before_load(self) -> None:
        """Finish, since parameters or state are about to be loaded; a failure is noted, not raised."""
        with suppress(OffloadError):
            self.finish()

    def after_load(self) -> None:
        """Forget what a failed step left, because all state was loaded."""
        self._run = self._broken = self._last = None
        self._waits_for = {}
        self._threads.forget_early()
        self._work.adopt_state()

    @property
    def steps_on_host(self) -> bool:
        """Whether parameters of a device are stepped in host memory."""
        return self._work.host is not None

    def forward_begins(self, group: WeightGroup) -> None:
        """Wait until ``group`` is stepped.

        Raises:
            OffloadError: Its step failed.
        """
        self._wait(self._waits_for.get(id(group), ()))

    def forward_ended(self, group: WeightGroup) -> None:
        """Nothing to do."""

    def backward_begins(self, group: WeightGroup) -> None:
        """Wait for the step of ``group`` before new gradients may take the place of those that it still reads.

        Raises:
            OffloadError: Its step failed.
        """
        self._wait(self._waits_for.get(id(group), ()))
        self._read_early()

    def ready(self, group: WeightGroup) -> None:
        """Wait, in another thread, until ``group`` is stepped or has failed to be, which ``forward_begins`` then
        raises."""
        for item in self._waits_for.get(id(group), ()):
            item.shown.wait()

    def ready_in_place(self, group: WeightGroup) -> None:
        """Wait as ``ready`` does, before the pages of mapped parameters are brought. A step that has not begun uses
        these pages."""
        for item in self._waits_for.get(id(group), ()):
            if not item.leave_in_place():
                item.shown.wait()

    def at_close(self, undo: Callable[[], object]) -> None:
        """Call it when this ends."""
        self._undo.callback(undo)

    def close(self) -> None:
        """Finish, and end the threads."""
        with self._undo:
            self.finish()
