"""The one watch of this process: made by the first ``Accelerator``, ended with the process group."""

from __future__ import annotations

import atexit
import signal
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from lockstep.config.sources import control_endpoint
from lockstep.errors import ControlError, UsageError
from lockstep.observe.hang.worker import StopSignals, WorkerWatch, say
from lockstep.runtime import process
from lockstep.runtime.clock import StepClock
from lockstep.runtime.failure import PREEMPTED, departures, of_signal
from lockstep.runtime.process import Runtime, check_same_versions

if TYPE_CHECKING:
    from lockstep.control.client import Client
    from lockstep.observe.hang.host import CoordinatorHost

CONNECT_LIMIT_S = 10.0
# To connect anew, between two looks for signals.
RECONNECT_LIMIT_S = 2.0
# A rank does not train before its launcher knows it, which decides by the ranks that it knows what a stop has to save.
LAUNCHER_LIMIT_S = 900.0
PAUSE_S = 1.0

Saver = Callable[[], str | None]
"""Saves the state of a run on all ranks, and ends training; returns where, or None where there is no place for it."""
NO_PLACE = "nothing was saved, because there is no project_dir with automatic naming"


class ProcessWatch:
    """Clock, worker's watch, and on rank 0 the coordinator if no launcher of ours has one."""

    _current: ProcessWatch | None = None

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self._worker: WorkerWatch | None = None
        self._has_coordinator = False
        self._host: CoordinatorHost | None = None
        self._speaks = False
        self._savers: list[weakref.WeakMethod[Saver]] = []

    def save_with(self, saver: Saver) -> None:
        """Call this bound method at the boundary at which all ranks stop. It is not kept alive."""
        self._savers.append(weakref.WeakMethod(saver))

    def committed(self, path: str) -> None:
        """Tell that a checkpoint is complete."""
        self._tell("committed", path=path)

    def ending(self) -> None:
        """Note that ``end_training`` begins: this rank has nothing more to do than to wait for the others."""
        self._tell("ending")

    def done(self) -> None:
        """Note that ``end_training`` is over: whatever this rank does now, no rank waits for it."""
        self._tell("done", ticks=self.clock.ticks)

    def _tell(self, verb: str, **values: object) -> None:
        if self._worker is not None and self._has_coordinator:
            self._worker.tell(verb, **values)

    def end(self) -> None:
        """Leave the coordinator, and give signals back."""
        if self._worker is not None:
            self._worker.end()
        if self._host is not None:
            self._host.close()
        self._worker = self._host = None
        atexit.unregister(self.end)
        if ProcessWatch._current is self:
            ProcessWatch._current = None

    # Starting ----------------------------------------------------------------------------------------

    def _start(self, runtime: Runtime, grace_s: float) -> None:
        connect = self._way_to_coordinator(runtime)
        client = None if connect is None else self._connected(connect, runtime.rank)
        self._has_coordinator = connect is not None
        # A process alone is not asked where it stands.
        if self._has_coordinator:
            _probe_evidence(runtime)
        self._speaks = runtime.is_main and control_endpoint() is None
        self._worker = WorkerWatch(
            runtime.rank,
            runtime.world_size,
            self.clock,
            self._stop,
            None if connect is None else partial(connect, RECONNECT_LIMIT_S),
            client,
            departures(),
            StopSignals(),
            grace_s,
        )
        departures().is_watched = self._has_coordinator
        self._worker.start()
        # Where there is no process group whose end would come first.
        atexit.register(self.end)

    def _way_to_coordinator(self, runtime: Runtime) -> Callable[[float], Client] | None:
        """Return how to connect, within some time, to the launcher's coordinator; without ours, to one that rank 0
        hosts."""
        endpoint = control_endpoint()
        if endpoint is None and (runtime.world_size == 1 or runtime.backend is None):
            return None
        # Imported here, because a process alone needs none of it.
        from lockstep.control import Secret
        from lockstep.control.client import Client
        from lockstep.observe.hang.host import CoordinatorHost, exchange_address

        if endpoint is not None:
            return partial(Client, (endpoint.host, endpoint.port), Secret.from_hex(endpoint.secret_hex))
        self._host = CoordinatorHost() if runtime.is_main else None
        found = exchange_address(self._host, runtime.control_device)
        return None if found is None else partial(Client, *found)

    def _connected(self, connect: Callable[[float], Client], rank: int) -> Client | None:
        """Return the first connection; None: rank 0 does not answer yet, and this rank trains meanwhile.

        Raises:
            ControlError: the launcher does not answer for 15 minutes, or has another secret.
        """
        from lockstep.control import SilentError

        launcher = control_endpoint()
        deadline = time.monotonic() + LAUNCHER_LIMIT_S
        has_said = False
        while True:
            try:
                return connect(CONNECT_LIMIT_S)
            except ControlError as error:
                if launcher is None:
                    say(f"rank {rank} trains without being watched, and tries again: {error}")
                    return None
                if not isinstance(error, SilentError) or time.monotonic() > deadline:
                    raise
                if not has_said:
                    say(
                        f"rank {rank} waits for its launcher, which has not answered for {CONNECT_LIMIT_S:g} s."
                    )
                has_said = True
                time.sleep(PAUSE_S)

    # Stopping ----------------------------------------------------------------------------------------

    def _stop(self, cause: str) -> NoReturn:
        """Save at the boundary at which all ranks are, say so once, and end."""
        self.clock.news("stop", reason=cause)
        savers = [method() for method in self._savers]
        places = [place for saver in savers if saver is not None and (place := saver()) is not None]
        where = (
            f"; the state is in {' and '.join(places)}, and the same command goes on from there"
            if places
            else ""
        )
        nothing = "" if places else f"; {NO_PLACE}"
        sentence = (
            f"all ranks stopped after {self.clock.boundaries} steps because of {cause}{where}{nothing}."
        )
        self._tell("stopped", sentence=sentence)
        if self._speaks:
            say(sentence)
        # Asked for before the first step was complete: there was nothing to save.
        had_nothing = self.clock.boundaries <= 1
        raise SystemExit(PREEMPTED if places or had_nothing else of_signal(_signal_number(cause)))


def watch_process(runtime: Runtime, enabled: bool, grace_s: float) -> ProcessWatch:
    """Return this process's watch, started if it is not yet. Where it is not ``enabled`` it only counts steps.

    Collective at its first call: every rank must make it.

    Raises:
        UsageError: on all ranks at the first call, if they run different versions of torch or lockstep.
    """
    if ProcessWatch._current is None:
        if runtime.world_size > 1:
            check_same_versions(runtime)
        ProcessWatch._current = ProcessWatch(StepClock())
        # Another run of this process is another world.
        process.at_end(ProcessWatch._current.end)
        if enabled:
            ProcessWatch._current._start(runtime, grace_s)
    return ProcessWatch._current


def _probe_evidence(runtime: Runtime) -> None:
    """Say it if parts of torch from which a hang is explained have changed."""
    from lockstep.torch_internals import c10d, dataloader

    for probe in (c10d.probe_recorder, dataloader.probe):
        try:
            probe()
        except UsageError as error:
            # No number depends on it: stacks still tell where a rank is.
            if runtime.is_main:
                sys.stderr.write(f"lockstep: the explanation of a hang will have less detail: {error}\n")


def _signal_number(cause: str) -> int:
    return int(getattr(signal, cause, signal.SIGTERM))
