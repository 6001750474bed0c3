"""What the coordinator knows of each worker, and where all of them stop.

In synchronous training all ranks' steps take equally long. What tells a slow rank is its local time: that of its step
without the waits for other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from lockstep.config.files import JsonObject
from lockstep.observe.hang.diagnosis import EndedRank
from lockstep.observe.hang.records import Message


class WorkerConnection(Protocol):
    """One worker's connection; ``data`` has its ``rank``, once it has said that."""

    data: JsonObject

    def send(self, message: dict[str, object]) -> None: ...


MOST_NUMBERS = 32
LONGEST_WORD = 40
MOST = 1e300


@dataclass
class WatchedRank:
    """What is known of one worker. Times are the coordinator's own monotonic seconds.

    Attributes:
        part: Of a step, in which its main thread was when it told so last.
        own: Numbers of its latest step, by name.
        latest: What a progress line shows of the run, from rank 0; what is no finite number is a word.
        passed: The step boundary that it passed last when it heard that all are to stop; None: it has not said.
        is_ending: It is in ``end_training``, where waiting for the others is no hang.
        machine: Equal for ranks whose processes one process can look up.
        waited_s: How long its main thread has waited for a processor so far.
        done_at: Its ticks when it came out of ``end_training``; None: it has not, or trains again.
    """

    peer: WorkerConnection
    host: str
    pid: int
    last_message_at: float
    progressed: float
    ticks: int = 0
    steps: int = 0
    boundaries: int = 0
    slowest_s: float = 0.0
    local_s: float = 0.0
    own: Mapping[str, float] = field(default_factory=dict)
    latest: Mapping[str, float | str] = field(default_factory=dict)
    passed: int | None = None
    is_ending: bool = False
    machine: str = ""
    waited_s: float = 0.0
    done_at: int | None = None
    part: str = ""

    @property
    def evaluates(self) -> bool:
        """It has been through two batches or calls, and is in no pass of training: nothing is left to compile."""
        return self.ticks >= 3 and self.part not in ("forward", "backward", "optimizer")

    @property
    def is_done(self) -> bool:
        """It has called ``end_training``: what it does now concerns nobody."""
        return self.done_at is not None

    def take_heartbeat(self, message: Message, now: float) -> None:
        """Take in a heartbeat."""
        ticks = integer_of(message, "ticks")
        # By this process's clock: those of machines are never compared.
        if ticks != self.ticks:
            self.ticks, self.progressed = ticks, now
        if self.done_at is not None and ticks > self.done_at:
            self.done_at = None
        self.steps = integer_of(message, "steps")
        self.waited_s = seconds_of(message, "waited_s")
        self.boundaries = integer_of(message, "boundaries")
        self.slowest_s = seconds_of(message, "slowest_s")
        self.local_s = seconds_of(message, "local_s")
        own = message.get("own")
        self.own = own if isinstance(own, Mapping) else {}
        self.part = str(message.get("part", ""))[:LONGEST_WORD]
        self.latest = numbers_of(message.get("latest"))


@dataclass
class WatchedRound:
    """What is known of one set of workers, by rank.

    Attributes:
        world_size: How many there are; 0: nobody has said it.
        ranks: Those that have a connection.
        ended: Those that have ended, or said that they do.
        vanished: Those whose connection is gone without a word; they may connect again.
    """

    world_size: int
    ranks: dict[int, WatchedRank] = field(default_factory=dict)
    ended: dict[int, EndedRank] = field(default_factory=dict)
    vanished: dict[int, WatchedRank] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Step boundaries that the foremost rank has passed."""
        return max((one.boundaries for one in (*self.ranks.values(), *self.vanished.values())), default=0)

    def missing(self) -> bool:
        """Return whether a rank that has not ended has no connection."""
        return any(rank not in self.ranks and rank not in self.ended for rank in range(self.world_size))

    def not_ended(self) -> list[WatchedRank]:
        return [state for rank, state in self.ranks.items() if rank not in self.ended]

    def running(self) -> dict[int, WatchedRank]:
        """Return the ranks in training."""
        return {
            rank: state for rank, state in self.ranks.items() if rank not in self.ended and not state.is_done
        }

    def tell_first(self, verb: str, **values: object) -> None:
        """Tell rank 0, which writes down what the run does."""
        state = self.ranks.get(0)
        if state is not None and 0 not in self.ended:
            state.peer.send({"kind": f"watch.{verb}", **values})

    def tell_others(self, about: int, verb: str) -> None:
        """Tell all but the rank that it is about."""
        for rank, state in self.ranks.items():
            if rank not in self.ended and rank != about:
                state.peer.send({"kind": f"watch.{verb}", "rank": about})


def integer_of(message: Message, name: str) -> int:
    """Return an integer of 0 or more in a message; 0 where there is none."""
    value = message.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def seconds_of(message: Message, name: str) -> float:
    """Return a duration in a message; 0 where there is none."""
    value = message.get(name)
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e9 else 0.0


def numbers_of(value: object) -> dict[str, float | str]:
    """Return numbers by name, as they travel; what is none is left out."""
    if not isinstance(value, Mapping) or len(value) > MOST_NUMBERS:
        return {}
    return {
        str(name): one
        for name, one in value.items()
        if (isinstance(one, (int, float)) and not isinstance(one, bool) and abs(one) < MOST)
        or one in ("nan", "inf", "-inf")
    }


def totals_of_ranks(ranks: Mapping[int, WatchedRank], world_size: int) -> dict[str, object]:
    """Return what rank 0 is told of all: ``local_s`` of each rank (None: not known), and sums of others' numbers.

    A sum is there where each of the others has told its number.
    """
    local = [ranks[rank].local_s or None if rank in ranks else None for rank in range(world_size)]
    others = [ranks[rank].own if rank in ranks else {} for rank in range(1, world_size)]
    names = {name for own in others for name in own}
    sums = {
        name: sum(amount_of(own, name) for own in others)
        for name in sorted(names)
        if all(name in own for own in others)
    }
    return {"local_s": local, "sums": sums}


def amount_of(values: Mapping[str, object], name: str) -> float:
    """Return a number of 0 or more among values; 0 where there is none."""
    value = values.get(name)
    return float(value) if isinstance(value, (int, float)) and 0 <= value < math.inf else 0.0


# Stopping together ------------------------------------------------------------------------------------


class CommonStop:
    """One stop of one set of workers: all at one step boundary, or at once where none of them has made a step.

    The order of messages: ``stop`` to every rank; each closes its gate and answers ``passed`` with the boundary that it
    passed last; then ``target``, the first boundary that none has passed, to every rank. Where no rank has made an
    optimizer step, there is nothing to save: ``stop_now`` instead. A rank trains only after it has connected, so one
    that has never done so has made no step; for one that has lost its connection the others wait.

    Args:
        round: The ranks.

    Attributes:
        cause: A signal's name; None: nobody has asked.
        nothing_begun: It was asked for before any rank had made a step, so that all may end at once.
    """

    def __init__(self, round: WatchedRound) -> None:
        self._round = round
        self._target: int | None = None
        self.cause: str | None = None
        self.nothing_begun = False

    def request(self, cause: str) -> None:
        """Have all ranks stop; asking again changes nothing."""
        if self.cause is not None:
            return
        self.cause = cause
        for state in self._round.not_ended():
            self.tell(state)
        self.choose_target()

    def tell(self, state: WatchedRank) -> None:
        """Tell a rank, if a stop is wanted; one that comes later hears of it then."""
        if self.nothing_begun:
            state.peer.send({"kind": "watch.stop_now"})
        elif self.cause is not None:
            state.peer.send({"kind": "watch.stop", "cause": self.cause})
        if self._target is not None:
            state.peer.send({"kind": "watch.target", "boundary": self._target})

    def choose_target(self) -> None:
        """Name the boundary at which all ranks stop, once every rank holds before its next one."""
        if self.cause is None or self._target is not None or self.nothing_begun:
            return
        running = self._round.not_ended()
        if self._round.vanished or any(state.passed is None for state in running):
            return
        if not running and self._round.ended:
            return
        if not any(state.passed or state.steps for state in running):
            self.nothing_begun = True
            for state in running:
                self.tell(state)
            return
        if self._round.missing():
            return
        self._target = 1 + max(state.passed or 0 for state in running)
        for state in running:
            state.peer.send({"kind": "watch.target", "boundary": self._target})
