"""Decides, from what the workers of a run tell, whether they hang, who is to blame, and where all of them stop.

The handler "watch" of the hub. It knows neither sockets nor clocks: messages and the time are passed in, always by
one thread.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockstep.watch.hang.diagnosis import Finding, Silent, diagnose
from lockstep.watch.hang.evidence import Evidence
from lockstep.watch.hang.process_state import state_of
from lockstep.watch.hang.stragglers import find_stragglers

# A hang is to be named before HANG_AFTER: suspicion comes earlier, because asking and answering take time.
SUSPICION_SHARE = 0.7
USUAL_STEPS = 5  # times the slowest usual step
SOON_S = 0.4
SILENT_AFTER_S = 2.8
ANSWER_LIMIT_S = 5.0
NOBODY_WAITS = "slow"
NOBODY_WAITS_FACTOR = 12.0  # then it is mostly a long evaluation or save
STRAGGLERS_EVERY_S = 5.0
STARTUP_S = 60.0  # before the first step, ranks wait for one that imports, downloads or compiles


@dataclass(frozen=True)
class WatchSettings:
    """``hang_after_s``: the least time without progress that is a hang. ``hang_timeout_s``: how long it may last."""

    hang_after_s: float = 5.0
    hang_timeout_s: float = 300.0


class Peer(Protocol):
    """One worker's connection."""

    def send(self, message: dict[str, Any]) -> None: ...


@dataclass
class _Rank:
    """What is known of one worker. Times are this process's own monotonic seconds."""

    peer: Peer
    host: str
    pid: int
    heard: float
    progressed: float
    ticks: int = 0
    boundaries: int = 0
    slowest_s: float = 0.0
    local_s: float = 0.0
    step_s: float = 0.0
    passed: int | None = None
    finished: bool = False


@dataclass
class _Question:
    """What the workers were asked for when they seemed to hang."""

    number: int
    asked: float
    answers: dict[int, Evidence] = field(default_factory=dict)


@dataclass
class _Hang:
    """One that was named; ``since`` is when anything got done last."""

    finding: Finding
    since: float


class Coordinator:
    """Watches one set of workers after the other; see ``start_round``.

    Args:
        settings: Limits.
        say: Prints one sentence for people.
    """

    def __init__(self, settings: WatchSettings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._states: dict[int, str] = {}
        self._questions = 0
        self.commits = 0
        self.start_round(0)

    def start_round(self, world_size: int) -> None:
        """Expect a new set of workers; forget the ones before. ``commits`` goes on."""
        self._world_size = world_size
        self._ranks: dict[int, _Rank] = {}
        self._question: _Question | None = None
        self._next_question = 0.0
        self._hang: _Hang | None = None
        self._stop_cause: str | None = None
        self._target: int | None = None
        self._named_stragglers: set[int] = set()
        self._next_stragglers = 0.0
        self._now = 0.0
        self.verdict: Finding | None = None
        self.stopped: str | None = None

    # What the workers tell ---------------------------------------------------------------------------

    def received(self, peer: Any, message: Mapping[str, Any]) -> None:
        """Take in one message of a worker. What does not make sense is left aside."""
        verb = str(message.get("kind", "")).partition(".")[2]
        if verb == "hello":
            self._hello(peer, message)
            return
        rank = peer.data.get("rank")
        state = self._ranks.get(rank)
        if state is None or state.peer is not peer:
            return  # of a round that is over
        state.heard = self._now
        if verb == "beat":
            self._beat(state, message)
        elif verb == "evidence" and self._question is not None:
            if message.get("question") == self._question.number:
                self._question.answers[rank] = Evidence.from_message(message.get("evidence", {}))
        elif verb == "stop_wanted":
            state.boundaries = _whole(message, "boundaries")  # newer than the last beat
            if not self.request_stop(str(message.get("cause", "a signal"))):
                peer.send({"kind": "watch.stop_now"})
        elif verb == "passed":
            state.passed = _whole(message, "boundary")
            self._settle_target()
        elif verb == "committed":
            self.commits += 1
        elif verb == "stopped":
            self.stopped = str(message.get("sentence", ""))[:1000]
        elif verb == "bye":
            state.finished = True
            self._settle_target()

    def lost(self, peer: Any) -> None:
        """A worker's connection is gone: it ended, or is ending."""
        rank = peer.data.get("rank")
        if rank in self._ranks and self._ranks[rank].peer is peer:
            del self._ranks[rank]
            self._settle_target()

    def process_states(self, states: Mapping[int, str]) -> None:
        """By pid, of workers on other machines, as their launchers see them."""
        self._states = dict(states)

    def _hello(self, peer: Any, message: Mapping[str, Any]) -> None:
        rank = message.get("rank")
        if not isinstance(rank, int):
            return
        peer.data["rank"] = rank
        self._world_size = self._world_size or _whole(message, "world_size")
        host, pid = str(message.get("host", "")), _whole(message, "pid")
        self._ranks[rank] = _Rank(peer, host, pid, heard=self._now, progressed=self._now)
        if self._stop_cause is not None:
            peer.send({"kind": "watch.stop", "cause": self._stop_cause})

    def _beat(self, state: _Rank, message: Mapping[str, Any]) -> None:
        ticks = _whole(message, "ticks")
        if ticks != state.ticks:
            state.ticks, state.progressed = ticks, self._now
        state.boundaries = _whole(message, "boundaries")
        state.slowest_s = _seconds(message, "slowest_s")
        state.local_s, state.step_s = _seconds(message, "local_s"), _seconds(message, "step_s")

    @property
    def steps(self) -> int:
        """Step boundaries that the foremost rank has passed in this round."""
        return max((state.boundaries for state in self._ranks.values()), default=0)

    # Stopping together -------------------------------------------------------------------------------

    def request_stop(self, cause: str) -> bool:
        """Have all ranks stop at one step boundary; ``cause`` is a signal's name.

        False when no rank has completed a step: there is nothing to save, and nobody may ever come to a boundary.
        """
        if not any(state.boundaries for state in self._ranks.values()):
            return False
        if self._stop_cause is None:
            self._stop_cause = cause
            for state in self._ranks.values():
                state.peer.send({"kind": "watch.stop", "cause": cause})
        return True

    def _settle_target(self) -> None:
        """Once every rank holds before its next boundary: the first one that none of them has passed."""
        if self._stop_cause is None or self._target is not None:
            return
        running = [state for state in self._ranks.values() if not state.finished]
        if not running or any(state.passed is None for state in running):
            return
        self._target = 1 + max(state.passed or 0 for state in running)
        for state in running:
            state.peer.send({"kind": "watch.target", "boundary": self._target})

    def end_all(self) -> None:
        """Have every worker end itself, where nobody else can."""
        for state in self._ranks.values():
            state.peer.send({"kind": "watch.end"})

    # Hangs -------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Look at the time; called a few times a second."""
        self._now = now
        running = {rank: state for rank, state in self._ranks.items() if not state.finished}
        if not running:
            return
        progressed = max(state.progressed for state in running.values())
        if self._question is not None:
            self._judge(self._question, running, progressed, now)
        elif self._hang is not None:
            self._follow(self._hang, running, progressed, now)
        elif now - progressed >= SUSPICION_SHARE * self._limit_s(running) and now >= self._next_question:
            self._ask(running, now)
        if now >= self._next_stragglers:
            self._next_stragglers = now + STRAGGLERS_EVERY_S
            self._name_stragglers(running)

    def _limit_s(self, running: Mapping[int, _Rank]) -> float:
        usual = max(state.slowest_s for state in running.values())
        return max(self._settings.hang_after_s, USUAL_STEPS * usual)

    def _ask(self, running: Mapping[int, _Rank], now: float) -> None:
        self._questions += 1
        self._question = _Question(self._questions, now)
        for state in running.values():
            state.peer.send({"kind": "watch.explain", "question": self._questions})

    def _judge(
        self, question: _Question, running: Mapping[int, _Rank], progressed: float, now: float
    ) -> None:
        if now - question.asked < ANSWER_LIMIT_S and any(
            # one that was heard of lately may only be slow to answer: on a busy machine, many are
            now - question.asked < SOON_S or now - state.heard < SILENT_AFTER_S
            for rank, state in running.items()
            if rank not in question.answers
        ):
            return
        self._question = None
        if progressed > question.asked:
            return
        facts = [
            question.answers.get(rank) or self._silent(rank, state, now) for rank, state in running.items()
        ]
        finding = diagnose(facts, self._world_size)
        if self._hang is not None:
            self._confirm(finding, now)
        elif finding.cause != NOBODY_WAITS or now - progressed >= NOBODY_WAITS_FACTOR * self._limit_s(
            running
        ):
            self._hang = _Hang(finding, progressed)
            self._say(f"{finding.sentence} Nothing has got done for {now - progressed:.0f} s.")
        else:
            self._next_question = now + 1.0

    def _silent(self, rank: int, state: _Rank, now: float) -> Silent:
        here = state.host == platform.node()
        known = state_of(state.pid) if here else self._states.get(state.pid, "unknown")
        return Silent(rank, state.host, state.pid, now - state.heard, known)

    def _follow(self, hang: _Hang, running: Mapping[int, _Rank], progressed: float, now: float) -> None:
        if progressed > hang.since:
            self._say(f"The ranks went on after {progressed - hang.since:.0f} s.")
            self._hang = None
        elif self.verdict is None and now >= max(hang.since + self._timeout_s(), self._next_question):
            self._ask(running, now)  # what was true when it was named may not be any more

    def _timeout_s(self) -> float:
        limit = self._settings.hang_timeout_s
        return limit if self.steps else max(limit, STARTUP_S)

    def _confirm(self, finding: Finding, now: float) -> None:
        """The hang has lasted too long, unless it turns out that the ranks are only busy."""
        if finding.cause != NOBODY_WAITS:
            self.verdict = finding
        self._next_question = now + self._settings.hang_after_s

    def _name_stragglers(self, running: Mapping[int, _Rank]) -> None:
        if len(running) < 2 or any(state.step_s == 0 for state in running.values()):
            return
        step_s = max(state.step_s for state in running.values())
        found = find_stragglers({rank: state.local_s for rank, state in running.items()}, step_s)
        for straggler in found:
            if straggler.rank not in self._named_stragglers:
                self._say(
                    f"Rank {straggler.rank} on {running[straggler.rank].host} is a straggler: its batches and forward "
                    f"passes take {straggler.ratio:.1f} times as long as those of the other ranks "
                    f"({1000 * running[straggler.rank].local_s:.0f} ms of a step), which wait for it. Look at what "
                    "else runs there, and at its data."
                )
        self._named_stragglers = {straggler.rank for straggler in found}


def _whole(message: Mapping[str, Any], name: str) -> int:
    value = message.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _seconds(message: Mapping[str, Any], name: str) -> float:
    value = message.get(name)
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e9 else 0.0
