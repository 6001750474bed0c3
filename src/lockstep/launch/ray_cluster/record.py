"""What driver and workers tell each other during a run: an actor of the cluster, in itself plain values."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import NamedTuple

from lockstep.runtime.exit_codes import PREEMPTED, of_signal


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
    """What a worker is to do. ``stop``: ask its process to stop; ``end``: end it. ``meeting``: where ranks meet."""

    stop: bool
    end: bool
    meeting: tuple[str, int] | None


class RunRecord:
    """The current round of a run. Its methods are called one at a time, as Ray does for actors."""

    def __init__(self) -> None:
        self._round = 0
        self._group: str | None = None
        self._begun: set[int] = set()
        self._ended: dict[int, RayEnded] = {}
        self._output: list[RayOutput] = []
        self._meeting: tuple[str, int] | None = None
        self._stop = False
        self._end = False

    def begin(self, rank: int, group: str) -> int:
        """A rank is about to start; returns the number of its round.

        ``group`` is Ray's name for the workers that run together; others come with another round.
        """
        if self._group not in (None, group) or rank in self._begun:
            self._round += 1
            self._begun, self._ended, self._meeting = set(), {}, None
        self._group = group
        self._begun.add(rank)
        return self._round

    def meet(self, host: str, port: int) -> None:
        """Where the ranks of this round meet."""
        self._meeting = host, port

    def orders(self, rank: int) -> Orders:
        """What the worker of a rank is to do. One rank is asked to stop: it agrees with the others on where."""
        failed = any(self._is_failure(ended) for ended in self._ended.values())
        return Orders(self._stop and rank == 0, self._end or failed, self._meeting)

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
