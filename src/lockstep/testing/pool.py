"""A pool of warm worker processes for tests: torch is imported once, a distributed test costs milliseconds.

The workers are forks of a server process that has torch in memory (``multiprocessing``'s
forkserver), so that replacing one that hung or died is cheap too. They die with this process, which
each of them watches.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from lockstep.config.sources import export_environment, inherited_environment, restore_environment
from lockstep.testing.pool_worker import Module, Report, Task, serve

MAX_WORKERS = 4
MOST_THREADS = 100
"""torch lets go of some process groups only with the process: their threads, three a group, wake up all the time."""
# What the server, and so each worker, starts with: one thread each, no GPU that they would share, and
# little patience with name servers: torch's store looks up the name of ::ffff:127.0.0.1 for its log,
# and an unanswered question costs 5 s.
SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "RES_OPTIONS": "timeout:1 attempts:1",
}
# Rank 0 opens the store; a rank that knocks earlier is refused and tries again only after 0.5 s.
HEAD_START_S = 0.01
PRELOADED = [
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    # DTensor imports it when it is first used.
    "torch._dynamo",
    "numpy",
    "lockstep.accelerator",
    "lockstep.observe.hang.process",
    "lockstep.preparation.prepare",
    "lockstep.testing.training",
]
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class DistributedTestError(AssertionError):
    """A function that ran on several ranks failed, hung or died on at least one of them."""


class Worker:
    """One process of the pool and our end of its pipe."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.log_path, self.stacks_path = directory / "output", directory / "stacks"
        context = multiprocessing.get_context("forkserver")
        self.connection, theirs = context.Pipe()
        paths = (str(self.log_path), str(self.stacks_path))
        self.process: ForkServerProcess = context.Process(target=serve, args=(theirs, *paths))
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send(self, task: Task) -> None:
        if self.log_path.exists():
            os.truncate(self.log_path, 0)
        self.connection.send_bytes(pickle.dumps(task))

    def receive(self) -> Report | None:
        """Return the report; None when the process is gone."""
        try:
            report: Report = pickle.loads(self.connection.recv_bytes())
            return report
        except (EOFError, OSError):
            return None

    def stacks(self, patience_s: float = 2.0) -> str:
        """Return the Python stacks of all of its threads, also while it is blocked in C."""
        if not self.process.is_alive():
            return "(the process is gone)\n"
        os.kill(self.pid, signal.SIGQUIT)
        deadline, size = time.monotonic() + patience_s, 0
        while time.monotonic() < deadline:
            time.sleep(0.05)
            # The stacks come in pieces: they are whole when the file has stopped growing.
            previous, size = size, self.stacks_path.stat().st_size
            if size and size == previous:
                break
        return self.stacks_path.read_text() or "(no answer)\n"

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task")) if os.path.isdir("/proc/self") else 0

    def output(self, limit: int = 4000) -> str:
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return text[-limit:]

    def kill(self) -> None:
        """End it and its children."""
        # It has no group of its own in its first instant.
        for kill in (os.killpg, os.kill):
            try:
                kill(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        self.process.join()
        self.connection.close()


class WorkerPool:
    """Runs functions on several ranks at once. See :meth:`run`.

    Args:
        preload: Modules that the server imports beside torch, if this pool is the first to start it.
    """

    def __init__(self, max_workers: int = MAX_WORKERS, preload: Sequence[str] = ()) -> None:
        self.max_workers = max_workers
        self.preload = preload
        self.workers: list[Worker] = []
        self.directory = Path(tempfile.mkdtemp(prefix="worker-pool-"))
        self.started = 0

    def run(
        self,
        fn: Callable[..., object],
        world_size: int,
        /,
        *args: object,
        timeout_s: float = 60.0,
        title: str | None = None,
        modules: Sequence[Module] = (),
        **kwargs: object,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on ranks 0 .. world_size-1; the results, in rank order.

        ``fn`` is a function at the top level of a module. The environment tells it where it is, as
        under torchrun; it starts its own process group, which is ended afterwards. ``title`` is its name
        in messages; ``modules`` those that hold what its arguments refer to.

        Raises:
            DistributedTestError: a rank raised (its traceback is shown, the first to fail first),
                died, or did not end within ``timeout_s`` (every rank's stacks are shown).
        """
        if not 1 <= world_size <= self.max_workers:
            raise ValueError(f"world_size is {world_size}, but the pool has 1 to {self.max_workers} workers.")
        call = pickle.dumps((fn, args, kwargs))
        of_call = (module_of(fn), *modules)
        port = free_port()
        ranks = self.ready(world_size)
        for rank, worker in enumerate(ranks):
            values = (rank, world_size, rank, world_size, "127.0.0.1", port)
            environment = dict(zip(RANK_VARIABLES, map(str, values), strict=True))
            worker.send(Task(call, of_call, list(sys.path), environment))
            if rank == 0 and world_size > 1:
                time.sleep(HEAD_START_S)
        reports, stacks = self.collect(ranks, timeout_s)
        failed = [r for r in range(world_size) if r in stacks or (p := reports.get(r)) is None or p.traceback]
        if failed:
            message = explain(
                title or f"{fn.__module__}.{fn.__qualname__}", ranks, reports, stacks, timeout_s
            )
            # Those that failed are not trusted with the next test, and the others keep their ranks for life.
            self.end_workers()
            raise DistributedTestError(message)
        return [pickle.loads(reports[rank].result or b"") for rank in range(world_size)]

    def collect(
        self, ranks: list[Worker], timeout_s: float, grace_s: float = 3.0
    ) -> tuple[dict[int, Report], dict[int, str]]:
        """Wait for all reports; after a failure only ``grace_s``. Returns reports and stacks by rank.

        A rank that died has neither report nor stacks.
        """
        pending: dict[Connection, int] = {worker.connection: rank for rank, worker in enumerate(ranks)}
        reports: dict[int, Report] = {}
        deadline = time.monotonic() + timeout_s
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return reports, {rank: ranks[rank].stacks() for rank in pending.values()}
            for connection in ready:
                rank = pending.pop(connection)  # type: ignore[call-overload]
                report = ranks[rank].receive()
                if report is not None:
                    reports[rank] = report
                if report is None or report.traceback:
                    deadline = min(deadline, time.monotonic() + grace_s)
        return reports, {}

    def ready(self, count: int) -> list[Worker]:
        """Return ``count`` living workers; the missing ones are started."""
        for worker in [worker for worker in self.workers if not worker.process.is_alive()]:
            worker.kill()
            self.workers.remove(worker)
        if any(worker.threads() > MOST_THREADS for worker in self.workers):
            self.end_workers()
        with server_environment(self.preload):
            while len(self.workers) < count:
                self.workers.append(Worker(self.directory / str(self.started)))
                self.started += 1
        return self.workers[:count]

    def end_workers(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers = []

    def close(self) -> None:
        self.end_workers()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextmanager
def server_environment(preload: Sequence[str] = ()) -> Iterator[None]:
    """Have the forkserver, if it starts now, start with one thread and what takes seconds to import."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED, *preload])
    before = inherited_environment()
    # A server that starts in a rank's process must not pass on its rank.
    restore_environment({name: value for name, value in before.items() if name not in RANK_VARIABLES})
    export_environment(SERVER_ENVIRONMENT)
    try:
        yield
    finally:
        restore_environment(before)


def module_of(fn: Callable[..., object]) -> Module:
    """Return the name and the file of the module that defines a function."""
    return fn.__module__, getattr(sys.modules[fn.__module__], "__file__", None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def explain(
    name: str,
    ranks: list[Worker],
    reports: dict[int, Report],
    stacks: dict[int, str],
    timeout_s: float,
) -> str:
    """Return the failure as text: first the rank that failed first, last those that only waited."""
    raised = sorted((report.time, rank) for rank, report in reports.items() if report.traceback)
    dead = [rank for rank in range(len(ranks)) if rank not in reports and rank not in stacks]
    parts = []
    if raised or dead:
        first = dead[0] if dead else raised[0][1]
        parts.append(f"{name} failed first on rank {first} of {len(ranks)}.\n")
    else:
        slow = ", ".join(map(str, sorted(stacks)))
        parts.append(f"{name} did not end within {timeout_s:g} s on rank {slow} of {len(ranks)}.\n")
    for rank in dead:
        ranks[rank].process.join(1)
        code = ranks[rank].process.exitcode
        parts.append(f"{heading(rank, 'died')}exit code {code}\n")
    parts += [f"{heading(rank, 'raised')}{reports[rank].traceback}" for _, rank in raised]
    parts += [f"{heading(rank, 'was still running; its stacks')}{stacks[rank]}" for rank in sorted(stacks)]
    for rank, worker in enumerate(ranks):
        if output := worker.output():
            parts.append(f"{heading(rank, 'printed')}{output}")
    return "\n".join(parts)


def heading(rank: int, what: str) -> str:
    return f"---- rank {rank} {what} ".ljust(80, "-") + "\n"
