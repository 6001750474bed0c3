"""Children of a process that has torch and Lockstep in memory: a fresh process for each point costs milliseconds."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

Tell = Callable[[Any], None]
LIMIT_S = 60.0
GRACE_S = 1.0


@dataclass
class Ended:
    """What a process reported, and how it ended: its exit code, or minus the signal that killed it."""

    reported: list[Any] = field(default_factory=list)
    code: int | None = None
    failure: str = ""

    @property
    def was_killed(self) -> bool:
        return self.code is not None and self.code < 0


def run(work: Callable[[Tell], None]) -> Ended:
    """``work`` in a process of its own, which tells by calling its argument. It ends when ``work`` does."""
    return run_ranks(lambda rank, tell: work(tell), 1)[0]


def run_ranks(work: Callable[[int, Tell], None], ranks: int, grace_s: float = GRACE_S) -> list[Ended]:
    """The same on several ranks of one group. When one of them dies, the others are killed ``grace_s`` later.

    Raises:
        AssertionError: a process raised something, or took too long. What the others raise when a rank was killed is
            what they have to do, and is only told.
    """
    port = _free_port()
    ended, pids = [Ended() for _ in range(ranks)], []
    stacks = tempfile.TemporaryFile("w+")  # noqa: SIM115 (the children write there)
    pipes: dict[Any, int] = {}
    for rank in range(ranks):
        ours, theirs = Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            faulthandler.dump_traceback_later(LIMIT_S - 5, file=stacks)
            _child(lambda tell, rank=rank: work(rank, tell), theirs, rank, ranks, port)  # type: ignore[misc]
        theirs.close()
        pids.append(pid)
        pipes[ours] = rank
    deadline, slow = time.monotonic() + LIMIT_S, False
    while pipes:
        ready: list[Any] = wait(list(pipes), max(0.0, deadline - time.monotonic()))
        for pipe in ready:
            rank = pipes[pipe]
            try:
                failure, reported = pipe.recv()
                ended[rank].failure += failure
                ended[rank].reported += [] if failure else [reported]
            except (EOFError, OSError):
                del pipes[pipe]
                ended[rank].code = os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1])
                if ended[rank].code:
                    deadline = min(deadline, time.monotonic() + grace_s)
        if pipes and time.monotonic() >= deadline:
            slow = not any(one.code for one in ended)
            for rank in pipes.values():
                os.kill(pids[rank], signal.SIGKILL)
            deadline = time.monotonic() + LIMIT_S
    failures = [one.failure for one in ended if one.failure]
    assert not failures or any(one.was_killed for one in ended), "\n".join(failures)
    if slow:
        stacks.seek(0)
        reported = [one.reported for one in ended]
        raise AssertionError(
            f"a process took more than {LIMIT_S:.0f} s; reported: {reported}\n{stacks.read()}"
        )
    return ended


def _child(work: Callable[[Tell], None], pipe: Connection, rank: int, ranks: int, port: int) -> None:
    code = 1
    try:
        gc.disable()
        if ranks > 1:
            values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            os.environ.update({name: str(value) for name, value in values.items()})
            os.environ.update(
                {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
            )
        work(lambda reported: pipe.send(("", reported)))
        code = 0
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
