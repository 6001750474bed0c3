"""What runs on Ray: in each worker the user's command as a process of its own, one rank, and the record of the run.

A process of its own, not a thread of Ray's worker: it is the real ``__main__``, gets signals, may fork
data-loader workers, and gives all its memory back at its end.
"""

from __future__ import annotations

import codecs
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from lockstep.config.sources import RESTART_VARIABLE, inherited_environment
from lockstep.launch.backend import worker_arguments
from lockstep.launch.network import listening_socket, store_on
from lockstep.launch.report import read_error_file
from lockstep.runtime.failure import PREEMPTED, of_signal


class RayOutput(NamedTuple):
    """Text that a rank wrote. ``stream`` is ``out`` or ``err``."""

    rank: int
    stream: str
    text: str


class RayEnded(NamedTuple):
    """How a rank's process ended: its exit code (negative: a signal), and what its error file says."""

    rank: int
    exit_code: int
    report: Mapping[str, object]
    ended_by_us: bool


class Orders(NamedTuple):
    """What a worker is to do. ``stop``: ask its process to stop; ``end``: end it.

    ``master``: the address and the port at which the ranks meet.
    """

    stop: bool
    end: bool
    master: tuple[str, int] | None


class RunRecord:
    """The current round of a run. Its methods are called one at a time, as Ray does for actors."""

    def __init__(self) -> None:
        self._round = 0
        self._group: str | None = None
        self._begun: set[int] = set()
        self._ended: dict[int, RayEnded] = {}
        self._output: list[RayOutput] = []
        self._master: tuple[str, int] | None = None
        self._stop = False
        self._end = False

    def begin(self, rank: int, group: str) -> int:
        """A rank is about to start; returns the number of its round.

        ``group`` is Ray's name for the workers that run together; others come with another round.
        """
        if self._group not in (None, group) or rank in self._begun:
            self._round += 1
            self._begun, self._ended, self._master = set(), {}, None
        self._group = group
        self._begun.add(rank)
        return self._round

    def set_master(self, host: str, port: int) -> None:
        """Where the ranks of this round meet."""
        self._master = host, port

    def orders(self, rank: int) -> Orders:
        """What the worker of a rank is to do. One rank is asked to stop: it agrees with the others on where."""
        failed = any(self._is_failure(ended) for ended in self._ended.values())
        return Orders(self._stop and rank == 0, self._end or failed, self._master)

    def _is_failure(self, ended: RayEnded) -> bool:
        stopped = {0, PREEMPTED, *([of_signal(signal.SIGTERM)] if self._stop else [])}
        return ended.exit_code not in stopped and not ended.ended_by_us

    def write(self, output: RayOutput) -> None:
        self._output.append(output)

    def ended(self, ended: RayEnded) -> bool:
        """A rank's process has ended; returns whether that was a failure, after which the others are ended."""
        self._ended[ended.rank] = ended
        return self._is_failure(ended)

    def request_stop(self) -> bool:
        """All ranks are to stop at a step boundary; returns whether there are any yet."""
        self._stop = True
        return bool(self._begun)

    def end(self) -> None:
        """All processes are to be ended now."""
        self._end = True

    def take(self) -> list[RayOutput]:
        """The output since the last call."""
        output, self._output = self._output, []
        return output

    def results(self) -> list[RayEnded]:
        """The processes of this round that have ended."""
        return list(self._ended.values())


POLL_S = 0.2
END_GRACE_S = 1.5
CHUNK_BYTES = 64 * 1024
# The key to the cluster is no business of the script.
NOT_FOR_SCRIPTS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@dataclass(frozen=True)
class Job:
    """What every rank runs, where, and with which variables beside those of its machine.

    ``python``: the command is what follows the interpreter, which is that of the worker.
    """

    command: tuple[str, ...]
    python: bool
    directory: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class RayPlacement:
    """One rank, as Ray counts it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    host: str


class RayFailure(Exception):
    """A rank's process failed; the record has the details, this text is for Ray's log."""


def train_loop(config: dict[str, Any]) -> None:
    """The function that TorchTrainer calls in every worker. Returns when the rank's process has ended well.

    Raises:
        Failed: the process failed, so that Ray ends the others and, if asked to, starts all of them again.
    """
    import ray
    import ray.train

    context = ray.train.get_context()
    record = config["record"]
    place = RayPlacement(
        context.get_world_rank(),
        context.get_world_size(),
        context.get_local_rank(),
        context.get_local_world_size(),
        context.get_node_rank(),
        ray.util.get_node_ip_address(),
    )
    number = ray.get(
        record.begin.remote(place.rank, ray.get_runtime_context().get_placement_group_id() or "")
    )
    # The address by which the cluster knows this machine, and no other.
    store = store_on(listening_socket(place.host), place.host) if place.rank == 0 else None
    if store is not None:
        ray.get(record.set_master.remote(place.host, store.port))
    try:
        ended = run(
            config["job"],
            place,
            number,
            lambda: ray.get(record.orders.remote(place.rank)),
            record.write.remote,
        )
        failed = ray.get(record.ended.remote(ended))
    finally:
        # The ranks met there, until the last of them was gone.
        del store
    if failed:
        raise RayFailure(f"rank {place.rank}: exit code {ended.exit_code}")


def run(
    job: Job,
    place: RayPlacement,
    number: int,
    orders: Callable[[], Orders],
    write: Callable[[RayOutput], object],
) -> RayEnded:
    """Run the command as one rank, pass its output on, and obey; returns how it ended."""
    master = _wait_for(orders)
    if master is None:
        return RayEnded(place.rank, -signal.SIGTERM, {}, ended_by_us=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        error_file = Path(folder) / "error.json"
        process = subprocess.Popen(
            worker_command(job),
            cwd=job.directory,
            env=environment_of(job, place, number, master, str(error_file)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        readers = [
            threading.Thread(target=_pass_on, args=(pipe, place.rank, stream, write), daemon=True)
            for stream, pipe in (("out", process.stdout), ("err", process.stderr))
        ]
        for reader in readers:
            reader.start()
        ended_by_us = _supervise(process, orders)
        for reader in readers:
            # What the process left behind may hold the pipe open.
            reader.join(END_GRACE_S)
        return RayEnded(place.rank, process.returncode, read_error_file(error_file), ended_by_us)


def worker_command(job: Job) -> list[str]:
    """The command behind ``bare.py``, which ties its life to this process's."""
    interpreter = [sys.executable] if job.python else []
    return [sys.executable, *worker_arguments((*interpreter, *job.command))]


def environment_of(
    job: Job, place: RayPlacement, number: int, master: tuple[str, int], error_file: str
) -> dict[str, str]:
    """All variables of a rank: those of this machine, those that were said, and its place."""
    inherited = inherited_environment()
    # Its output goes into a pipe, and is to be seen at once.
    inherited.setdefault("PYTHONUNBUFFERED", "1")
    for name in NOT_FOR_SCRIPTS:
        inherited.pop(name, None)
    return {
        **inherited,
        **job.environment,
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.node_rank),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        # Ranks are clients of the store that rank 0's worker has opened already.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(number),
        "TORCHELASTIC_ERROR_FILE": error_file,
        RESTART_VARIABLE: str(number),
    }


def _wait_for(orders: Callable[[], Orders]) -> tuple[str, int] | None:
    """Where to meet; None if the run ended before that was known."""
    while True:
        now = orders()
        if now.end:
            return None
        if now.master is not None:
            return now.master
        time.sleep(POLL_S)


def _supervise(process: subprocess.Popen[bytes], orders: Callable[[], Orders]) -> bool:
    """Wait for the process and pass on what it is to do; returns whether it was ended by order."""
    asked = False
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
            return False
        now = orders()
        if now.end:
            return _end_process(process)
        if now.stop and not asked:
            asked = True
            process.send_signal(signal.SIGTERM)


def _end_process(process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        return False
    process.terminate()
    try:
        process.wait(END_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return True


def _pass_on(pipe: IO[bytes] | None, rank: int, stream: str, write: Callable[[RayOutput], object]) -> None:
    assert pipe is not None
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while chunk := os.read(pipe.fileno(), CHUNK_BYTES):
        text = decoder.decode(chunk)
        if text:
            write(RayOutput(rank, stream, text))
    if rest := decoder.decode(b"", final=True):
        write(RayOutput(rank, stream, rest))
