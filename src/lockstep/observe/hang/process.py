"""The one watch of this process: made by the first ``Accelerator``, ended with the process group."""

from __future__ import annotations

import atexit
import signal
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import torch
import torch.distributed as dist

from lockstep.comm.call_check import CallCheck
from lockstep.config.sources import control_endpoint, process_environment
from lockstep.control.client import Client
from lockstep.control.secret import Secret, new_secret
from lockstep.control.server import Server
from lockstep.errors import ControlError, UsageError
from lockstep.observe.hang.coordinator import Coordinator, WatchSettings
from lockstep.observe.hang.worker import StopSignals, WorkerWatch, nothing_to_save
from lockstep.runtime import failure, process
from lockstep.runtime.failure import PREEMPTED, of_signal
from lockstep.runtime.process import Runtime, check_same_versions
from lockstep.runtime.step import StepClock
from lockstep.torch_internals import c10d, dataloader

LOOPBACK = "127.0.0.1"
CONNECT_LIMIT_S = 10.0
MOST_CHECKED_RANKS = 16  # each rank reads what every other one is about to call
INVITATION_BYTES = 512

Saver = Callable[[bool], str | None]
"""Saves the state of a run on all ranks, and ends training, if it is told True; returns where, or None where there is
no place for it."""
NO_PLACE = "nothing was saved, because there is no project_dir with automatic naming"


class ProcessWatch:
    """Clock, worker's watch, and on rank 0 the coordinator where no launcher of ours has one."""

    _current: ProcessWatch | None = None

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self._worker: WorkerWatch | None = None
        self._server: Server | None = None
        self._coordinator: Coordinator | None = None
        self._speaks = False
        self._calls: CallCheck | None = None
        self._savers: list[weakref.WeakMethod[Saver]] = []

    def save_with(self, saver: Saver) -> None:
        """Call this bound method at the boundary at which all ranks stop, or save. It is not kept alive."""
        self._savers.append(weakref.WeakMethod(saver))

    def committed(self, path: str) -> None:
        """A checkpoint is complete."""
        if self._worker is not None:
            self._worker.committed(path)

    def ending(self) -> None:
        """``end_training`` begins: this rank has nothing more to do than to wait for the others."""
        if self._worker is not None:
            self._worker.ending()

    def done(self) -> None:
        """``end_training`` is over: whatever this rank does now, nobody waits for it."""
        if self._worker is not None:
            self._worker.done()

    def end(self) -> None:
        """Leave the coordinator, and give signals and functions of torch back."""
        if self._calls is not None:
            self._calls.uninstall()
        if self._worker is not None:
            self._worker.end()
        if self._server is not None:
            with suppress(ControlError):
                self._server.call(self._leave_as_host)
            self._server.close()
        self._worker = self._server = None
        atexit.unregister(self.end)
        if ProcessWatch._current is self:
            ProcessWatch._current = None

    # Starting ----------------------------------------------------------------------------------------

    def _start(self, runtime: Runtime, grace_s: float) -> None:
        client = self._connect(runtime)
        # A process alone is not asked where it stands.
        for probe in (c10d.probe_recorder, dataloader.probe) if client is not None else ():
            try:
                probe()
            except UsageError as error:  # nobody's numbers depend on it: stacks still tell where a rank is
                if runtime.is_main:
                    sys.stderr.write(f"lockstep: the explanation of a hang will have less detail: {error}\n")
        self._speaks = runtime.is_main and control_endpoint() is None
        self._worker = WorkerWatch(
            runtime.rank,
            runtime.world_size,
            self.clock,
            self._stop,
            client,
            process.departures(),
            StopSignals(),
            grace_s,
            self._save,
        )
        process.departures().is_told = client is not None
        self._worker.start()
        if 1 < runtime.world_size <= MOST_CHECKED_RANKS and runtime.control_device.type == "cpu":
            self._calls = CallCheck()
            self._calls.install()
        atexit.register(self.end)  # where there is no process group whose end would come first

    def _connect(self, runtime: Runtime) -> Client | None:
        endpoint = control_endpoint()
        try:
            if endpoint is not None:
                return Client(
                    (endpoint.host, endpoint.port), Secret.from_hex(endpoint.secret_hex), CONNECT_LIMIT_S
                )
            if runtime.world_size > 1 and runtime.backend is not None:
                return self._join_coordinator_of_rank_0(runtime)
        except ControlError as error:
            sys.stderr.write(f"lockstep: rank {runtime.rank} trains without being watched: {error}\n")
        return None

    def _join_coordinator_of_rank_0(self, runtime: Runtime) -> Client | None:
        """Under a launcher that is not ours; the invitation goes through the process group, whose members it is for."""
        invitation = torch.zeros(INVITATION_BYTES, dtype=torch.uint8)
        if runtime.is_main:
            address = process_environment(need_rendezvous=False).master_addr or LOOPBACK
            secret = new_secret()
            coordinator = self._coordinator = Coordinator(WatchSettings(), _say)
            try:
                self._server = Server(secret, address, handlers={"watch": _Ending(coordinator)})
                self._server.start()
                host, port = self._server.address[:2]
                text = f"{host} {port} {secret.hex()}".encode()
                invitation[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            except (ControlError, OSError, ValueError) as error:  # the ranks still hear that there is none
                _say(f"hangs of this run will not be found: {error}")
        invitation = invitation.to(runtime.control_device)
        dist.broadcast(invitation, src=0)
        words = bytes(invitation.cpu().tolist()).rstrip(b"\0").decode().split(" ")
        if len(words) != 3:
            return None
        return Client((words[0], int(words[1])), Secret.from_hex(words[2]), CONNECT_LIMIT_S)

    def _leave_as_host(self) -> None:
        """The other ranks hear of this one's end before the coordinator ends with it."""
        if self._coordinator is not None and not failure.has_failed():
            self._coordinator.left(0)

    # Stopping ----------------------------------------------------------------------------------------

    def _stop(self, cause: str) -> NoReturn:
        """All ranks are at the same boundary: save, say so once, and end."""
        self.clock.news("stop", reason=cause)
        places = self._saved(ends=True)
        where = (
            f"; the state is in {' and '.join(places)}, and the same command goes on from there"
            if places
            else ""
        )
        nothing = "" if places else f"; {NO_PLACE}"
        sentence = (
            f"all ranks stopped after {self.clock.boundaries} steps because of {cause}{where}{nothing}."
        )
        assert self._worker is not None
        self._worker.stopped(sentence)
        if self._speaks:
            _say(sentence)
        # asked for before the first step was complete: there was nothing to save
        had_nothing = self.clock.boundaries <= 1
        raise SystemExit(PREEMPTED if places or had_nothing else of_signal(_number(cause)))

    def _save(self, cause: str) -> None:
        """All ranks are at the same boundary: save, say where, and go on."""
        places, step = self._saved(ends=False), self.clock.boundaries
        done = f"the state is in {' and '.join(places)}" if places else NO_PLACE
        assert self._worker is not None
        self._worker.saved(f"After {step} steps, because of {cause}: {done}.")

    def _saved(self, ends: bool) -> list[str]:
        """Where the state was saved."""
        savers = [method() for method in self._savers]
        return [place for saver in savers if saver is not None and (place := saver(ends)) is not None]


class _Ending:
    """A coordinator whose verdict ends the run: the workers themselves, where no launcher of ours can."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._has_said = False
        self.received, self.lost = coordinator.received, coordinator.lost

    def tick(self, now: float) -> None:
        self._coordinator.tick(now)
        if self._coordinator.verdict is not None:
            self._coordinator.end_all("hang")
        if self._coordinator.nothing_begun and not self._has_said:
            self._has_said = True
            _say(f"{nothing_to_save(self._coordinator.stop_cause)}.")


def watch_process(runtime: Runtime, enabled: bool, grace_s: float) -> ProcessWatch:
    """This process's watch, started if it is not yet. Where it is not ``enabled`` it only counts steps.

    Collective at its first call: every rank must make it.

    Raises:
        UsageError: on all ranks at the first call, if they run different versions of torch or lockstep.
    """
    if ProcessWatch._current is None:
        if runtime.world_size > 1:
            check_same_versions(runtime)
        ProcessWatch._current = ProcessWatch(StepClock())
        process.at_end(ProcessWatch._current.end)  # another run of this process is another world
        if enabled:
            ProcessWatch._current._start(runtime, grace_s)
    return ProcessWatch._current


def _say(sentence: str) -> None:
    sys.stderr.write(f"lockstep: {sentence}\n")
    sys.stderr.flush()


def _number(cause: str) -> int:
    return int(getattr(signal, cause, signal.SIGTERM))
