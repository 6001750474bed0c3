"""The workers of one round on this machine: started and ended through torch's elastic multiprocessing.

Each rank's output goes to the console, or to ``rank-N.out`` and ``rank-N.err`` in a directory.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import start_processes
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, Std

from lockstep.config.sources import RESTART_VARIABLE, inherited_environment
from lockstep.launch import bare
from lockstep.launch.backend import worker_arguments
from lockstep.launch.console import rank_log, say
from lockstep.launch.forks import ForkServer, can_fork
from lockstep.launch.network import store_on
from lockstep.launch.plan import LaunchPlan
from lockstep.launch.rendezvous import Round
from lockstep.launch.report import Failure, read_error_file
from lockstep.runtime.failure import PREEMPTED


class RankLogs(LogsSpecs):
    """Names files by global rank, and by ``round`` after a restart. ``tee`` shows the lines on the console as well."""

    def __init__(self, work_dir: str, log_dir: str | None = None, tee: bool = False) -> None:
        std = Std.ALL if log_dir else Std.NONE
        super().__init__(log_dir or work_dir, redirects=std, tee=std if tee else Std.NONE)
        self._work_dir = work_dir
        self._log_dir = log_dir
        self.tee = tee
        self.round = 0
        self.stderr_of: dict[int, str] = {}

    @property
    def root_log_dir(self) -> str:
        return self._log_dir or self._work_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Destinations by local rank; also tells each worker its error file."""
        destination = LogsDest()
        for local_rank, environment in envs.items():
            rank = environment["RANK"]
            error_file = rank_log(self._work_dir, rank, "error.json", self.round)
            environment["TORCHELASTIC_ERROR_FILE"] = error_file
            destination.error_files[local_rank] = error_file
            # torch's word for the console.
            out = err = ""
            if self._log_dir:
                out, err = (rank_log(self._log_dir, rank, stream, self.round) for stream in ("out", "err"))
                self.stderr_of[local_rank] = err
            destination.stdouts[local_rank], destination.stderrs[local_rank] = out, err
            if self.tee:
                destination.tee_stdouts[local_rank], destination.tee_stderrs[local_rank] = out, err
        return destination


# What torch's multiprocessing takes over, in a script that is a launcher itself.
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"


class Workers:
    """``nproc`` processes, each of which runs ``command`` as one rank.

    Args:
        place: which ranks these are, and where they meet.
        environment: what they get beside the launcher's own, the same for all.
        restarts: what torch's variables say about restarts: (so far, at most).
        role: what they find in ROLE_NAME.
        forks: what starts them as forks.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        nproc: int,
        place: Round,
        environment: Mapping[str, str],
        logs: RankLogs,
        run_id: str,
        max_restarts: int,
        role: str = "default",
        forks: ForkServer | None = None,
    ) -> None:
        self._logs = logs
        self.ranks = {local: place.base_rank + local for local in range(nproc)}
        environments = {
            local: {
                **environment,
                **_torchrun_variables(local, nproc, place, run_id, max_restarts),
                "ROLE_NAME": role,
            }
            for local in self.ranks
        }
        logs.round = place.number
        prefixes = {local: f"[rank {rank}] " for local, rank in self.ranks.items()}
        arguments = dict.fromkeys(self.ranks, worker_arguments(command))
        start = start_processes if forks is None else forks.processes
        self._context = start(
            name=role,
            entrypoint=sys.executable,
            args=arguments,
            envs=environments,
            logs_specs=logs,
            log_line_prefixes=prefixes,
        )
        self._processes = {
            local: handler.proc
            for local, handler in self._context.subprocess_handlers.items()  # type: ignore[attr-defined]
        }
        self._ended_by_themselves: frozenset[int] | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids of those that still run."""
        return [process.pid for process in self._processes.values() if process.poll() is None]

    def exit_codes(self) -> dict[int, int]:
        """Return the exit codes of those that have ended, by local rank; negative for a signal."""
        codes = {local: process.poll() for local, process in self._processes.items()}
        return {local: code for local, code in codes.items() if code is not None}

    def end(self, number: signal.Signals, grace_s: float) -> None:
        """End those that still run: ``number``, which stopped ones get too, then SIGKILL."""
        # Whoever ends from here on was ended by this launcher.
        if self._ended_by_themselves is None:
            self._ended_by_themselves = frozenset(self.exit_codes())
        for pid in self.pids:
            # It ended meanwhile.
            with suppress(OSError):
                os.killpg(pid, number)
                # Only now does a stopped process see the other one.
                os.killpg(pid, signal.SIGCONT)
        self._context.close(number, grace_s)  # type: ignore[arg-type]

    def failures(self) -> list[Failure]:
        """Return the failures of workers that ended badly or reported an error, while or before the others are
        ended."""
        codes = self.exit_codes()
        themselves = frozenset(codes) if self._ended_by_themselves is None else self._ended_by_themselves
        found = []
        for local, rank in self.ranks.items():
            report, code = read_error_file(self._context.error_files[local]), codes.get(local, 1)
            if report or codes.get(local, 0) not in (0, PREEMPTED):
                ended_by_us = local not in themselves and not report
                log = None if self._logs.tee else self._logs.stderr_of.get(local)
                found.append(Failure(rank, code if code else 1, report, log, ended_by_us))
        return found


class Starter:
    """Makes the workers of each round of a plan, and hosts the store in which they meet where that is for this machine.

    Args:
        work_dir: for error reports.
        launch_id: what marks the processes of this launcher; its run id for torch, too.
        control: how workers find the coordinator.
    """

    def __init__(self, plan: LaunchPlan, work_dir: str, launch_id: str, control: Mapping[str, str]) -> None:
        self._plan = plan
        self._launch_id = launch_id
        self._control = control
        self._logs = RankLogs(work_dir, plan.log_dir, plan.tee)
        self._store: TCPStore | None = None
        self._forks: ForkServer | None = None
        if plan.fault_policy.warm_restarts:
            if can_fork(plan.command):
                self._forks = ForkServer(plan.command, say)
            else:
                say(
                    "lockstep: --warm-restarts needs Linux and a script or module of Python; workers are new "
                    "processes."
                )

    def start(self, place: Round) -> Workers:
        """Start the workers that belong into this place."""
        if place.listener is not None:
            self._store = store_on(place.listener, place.address)
        environment = {**self._control, RESTART_VARIABLE: str(place.number)} if self._control else {}
        plan = self._plan
        return Workers(
            plan.command,
            plan.nproc,
            place,
            environment,
            self._logs,
            run_id=self._launch_id,
            max_restarts=plan.fault_policy.max_restarts,
            role=plan.role,
            forks=self._forks,
        )

    def sweep(self) -> None:
        """Free the store's port after a round, and end what the workers may have left behind."""
        # The store lets go of its port with its last reference.
        self._store = None
        if os.path.isdir("/proc/self"):
            bare.end(self._launch_id, with_watches=True, kept=self._forks.pids if self._forks else ())

    def close(self) -> None:
        """End, at the end of the launch, what waits for another round."""
        if self._forks is not None:
            self._forks.close()
            self.sweep()


def _torchrun_variables(
    local: int, nproc: int, place: Round, run_id: str, max_restarts: int
) -> dict[str, str]:
    """Return what ``torchrun`` tells a worker of its place."""
    rank, world, groups = str(place.base_rank + local), str(place.world_size), str(place.machines)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": str(place.group_rank),
        "GROUP_WORLD_SIZE": groups,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        "TORCHELASTIC_RESTART_COUNT": str(place.number),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": SIGNALS,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited_environment().get(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
        ),
    }
