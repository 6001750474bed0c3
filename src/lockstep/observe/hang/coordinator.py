"""Decides, from what the workers of a run tell, whether they hang, who is to blame, and where all of them stop.

The handler "watch" of the launch's server. It knows neither sockets nor clocks: messages and the time are passed in,
always by one thread.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from lockstep.errors import ControlError
from lockstep.observe.hang.common_save import CommonSave
from lockstep.observe.hang.diagnosis import Ended, Finding, Silent, diagnose
from lockstep.observe.hang.ranks import (
    CommonStop,
    WatchedRank,
    WorkerConnection,
    find_stragglers,
    integer_of,
    state_of,
    totals_of_ranks,
)
from lockstep.observe.hang.records import Evidence, Message
from lockstep.observe.hang.view import ranks_of

# A hang is to be named before HANG_AFTER: suspicion comes earlier, because asking and answering take time.
SUSPICION_SHARE = 0.7
# In multiples of the slowest usual step.
USUAL_STEPS = 5
SOON_S = 0.4
SILENT_AFTER_S = 2.8
ANSWER_LIMIT_S = 5.0
# Where nobody waits, it is mostly a long evaluation or save.
NOBODY_WAITS_FACTOR = 12.0
STRAGGLERS_EVERY_S = 5.0
TELL_EVERY_S = 1.0
# A rank that failed ends within seconds, and then its error is what ends the run.
FAILED_LEAVE_S = 15.0
# The number of a question that is not the coordinator's own.
FOR_PEOPLE = "for people"
# What cannot be a rank that is only busy, or that starts slowly: named at once.
CERTAIN = ("mismatch", "stopped", "ended")
NAMED_THOUGH_NOBODY_WAITS = ("stopped", "data")
# What cannot end by itself is ended when it was still so at this share of HANG_AFTER: named before, looked at again.
LASTING_SHARE = 2.0


@dataclass(frozen=True)
class WatchSettings:
    """Limits.

    Attributes:
        hang_after_s: The least time without progress that is a hang.
        hang_timeout_s: How long a hang may last.
        startup_s: Until the first optimizer step both are at least this, since ranks wait for one that imports,
            downloads or compiles.
    """

    hang_after_s: float = 5.0
    hang_timeout_s: float = 300.0
    startup_s: float = 60.0


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
        self._now = 0.0
        self.commits = 0
        self.at_answer: Callable[[Evidence], None] = lambda evidence: None
        """Is told what a rank does, after ``ask_for_people``."""
        self.at_save: Callable[[str], None] = lambda sentence: None
        """Is told what came of a save that people asked for."""
        self.start_round(0)

    def start_round(self, world_size: int) -> None:
        """Expect a new set of workers; forget the ones before. ``commits`` goes on."""
        self._world_size = world_size
        self._ranks: dict[int, WatchedRank] = {}
        self._ended: dict[int, Ended] = {}
        self._vanished: dict[int, WatchedRank] = {}
        self._question: _Question | None = None
        self._next_question = 0.0
        self._hang: _Hang | None = None
        self._stop = CommonStop(
            lambda: [state for rank, state in self._ranks.items() if rank not in self._ended],
            lambda: bool(self._ranks or self._ended or self._vanished),
        )
        self._save = CommonSave(self._running, lambda sentence: self.at_save(sentence))
        self._named_stragglers: set[int] = set()
        self._next_stragglers = 0.0
        self._next_report = 0.0
        self._failed_at: float | None = None
        self.verdict: Finding | None = None
        self.stopped: str | None = None

    # What the workers tell ---------------------------------------------------------------------------

    def received(self, peer: WorkerConnection, message: Message) -> None:
        """Take in one message of a worker. What does not make sense is left aside."""
        verb = str(message.get("kind", "")).partition(".")[2]
        if verb == "hello":
            self._hello(peer, message)
            return
        rank = peer.data.get("rank", -1)
        state = self._ranks.get(rank)
        if state is None or state.peer is not peer:
            # It is of a round that is over.
            return
        state.heard = self._now
        if verb == "heartbeat":
            state.take_heartbeat(message, self._now)
        elif verb == "evidence":
            self._take_evidence(rank, message)
        elif verb == "stop_wanted":
            # This is newer than the last heartbeat.
            self._note_progress(state, message)
            self.request_stop(str(message.get("cause", "a signal")))
        elif verb == "passed":
            self._note_progress(state, message)
            state.passed = integer_of(message, "boundary")
            self._stop.settle()
        elif verb == "may_save":
            self._note_progress(state, message)
            self._save.passed(rank, message.get("number"), integer_of(message, "boundary"))
        elif verb == "saved":
            self._save.saved(rank, str(message.get("sentence", ""))[:1000])
        elif verb == "committed":
            self.commits += 1
        elif verb == "stopped":
            self.stopped = str(message.get("sentence", ""))[:1000]
        elif verb == "ending":
            state.is_ending = True
        elif verb == "done":
            # More ticks than these say that it trains again.
            state.is_ending, state.done_at = False, max(state.ticks, integer_of(message, "ticks"))
        elif verb == "bye":
            self._bye(rank, message)

    def lost(self, peer: WorkerConnection) -> None:
        """A worker's connection is gone: it ended, or is ending."""
        rank = peer.data.get("rank", -1)
        if rank in self._ranks and self._ranks[rank].peer is peer:
            # Its process may go on, so it is judged like one that does not answer.
            self._vanished[rank] = self._ranks.pop(rank)
            self._stop.settle()

    def left(self, rank: int) -> None:
        """A launcher has seen that this rank's process ended with exit code 0."""
        last = self._ended[rank].last if rank in self._ended else None
        self._note_end(Ended(rank, "has ended with exit code 0", last))

    def process_states(self, states: Mapping[int, str]) -> None:
        """By pid, of workers on other machines, as their launchers see them."""
        self._states = dict(states)

    def _hello(self, peer: WorkerConnection, message: Message) -> None:
        rank = message.get("rank")
        if not isinstance(rank, int):
            return
        peer.data["rank"] = rank
        # Without our launcher the first worker tells how many there are.
        self._world_size = self._world_size or integer_of(message, "world_size")
        host, pid = str(message.get("host", "")), integer_of(message, "pid")
        state = self._ranks[rank] = WatchedRank(peer, host, pid, heard=self._now, progressed=self._now)
        # The same process, which has made another Accelerator.
        if self._ended.pop(rank, None) is not None:
            self._tell_others(rank, "back")
        for other in self._ended:
            peer.send({"kind": "watch.left", "rank": other})
        self._stop.tell(state)

    def _take_evidence(self, rank: int, message: Message) -> None:
        question = message.get("question")
        if question == FOR_PEOPLE:
            self.at_answer(replace(Evidence.from_message(message.get("evidence", {})), rank=rank))
        elif self._question is not None and question == self._question.number:
            self._question.answers[rank] = Evidence.from_message(message.get("evidence", {}))

    def _note_progress(self, state: WatchedRank, message: Message) -> None:
        state.boundaries = max(
            state.boundaries, integer_of(message, "boundaries"), integer_of(message, "boundary")
        )
        state.steps = max(state.steps, integer_of(message, "steps"))

    def _bye(self, rank: int, message: Message) -> None:
        """A rank ends its part of the run; after a failure the launcher finds out by itself."""
        try:
            last = Evidence.from_message(message["evidence"])
        except (KeyError, ControlError):
            last = None
        how = "has failed" if message.get("failed") is True else "has ended"
        if message.get("failed") is True:
            self._failed_at = self._now
        self._note_end(Ended(rank, how, last))

    def _note_end(self, ended: Ended) -> None:
        is_news = ended.rank not in self._ended and ended.how != "has failed"
        self._ended[ended.rank] = ended
        if is_news:
            # Answers may be older than this end.
            self._question = None
            self._tell_others(ended.rank, "left")
        self._stop.settle()

    def _tell_others(self, about: int, verb: str) -> None:
        for rank, state in self._ranks.items():
            if rank not in self._ended and rank != about:
                state.peer.send({"kind": f"watch.{verb}", "rank": about})

    @property
    def steps(self) -> int:
        """Step boundaries that the foremost rank has passed in this round."""
        return max((state.boundaries for state in self._ranks.values()), default=0)

    def progress(self) -> Mapping[str, float | str] | None:
        """Rank 0's newest numbers for a line of progress; None where a rank that trains shows a bar of its own.

        Any thread may ask.
        """
        ranks = list(self._ranks.values())
        if any(state.has_bar and (state.boundaries or state.latest) for state in ranks):
            return None
        return self.latest()

    def latest(self) -> Mapping[str, float | str]:
        """Rank 0's newest numbers of the run."""
        state = self._ranks.get(0)
        return {} if state is None else state.latest

    def standing(self) -> list[dict[str, object]]:
        """What is known of each rank, see ``view.py``."""
        return ranks_of(self._ranks, self._ended, self._named_stragglers, self._now)

    def ask_for_people(self) -> int:
        """Have each rank say what it does, for ``at_answer``; returns how many were asked."""
        asked = [state for rank, state in self._ranks.items() if rank not in self._ended]
        for state in asked:
            state.peer.send({"kind": "watch.explain", "question": FOR_PEOPLE})
        return len(asked)

    def request_save(self, cause: str) -> str:
        """Have all ranks save at one step boundary; returns why not, in a clause, or "". See ``at_save``."""
        if self.stop_cause:
            return "the run is about to stop, and saves then"
        if self._world_size > len(running := self._running()):
            return f"only {len(running)} of {self._world_size} ranks are in training"
        return self._save.request(cause, self._now)

    def _running(self) -> dict[int, WatchedRank]:
        return {
            rank: state
            for rank, state in self._ranks.items()
            if rank not in self._ended and not state.is_done
        }

    # Stopping together -------------------------------------------------------------------------------

    def request_stop(self, cause: str) -> None:
        """Have all ranks stop at one step boundary; ``cause`` is a signal's name.

        Where no rank has made a step, ``nothing_begun`` becomes true, since there is nothing to save.
        """
        self._save.withdraw("the run is about to stop")
        self._stop.request(cause)

    @property
    def nothing_begun(self) -> bool:
        """A stop was asked for before any rank had made a step: the workers end, or may be ended."""
        return self._stop.nothing_begun

    @property
    def stop_cause(self) -> str:
        """What the stop was asked for; "": none was."""
        return self._stop.cause or ""

    def end_all(self, reason: str, sentence: str = "", rank: int | None = None) -> None:
        """Have every worker end itself, where nobody else can.

        Args:
            reason: "hang", "error", or what else the end of a run is written down as.
            sentence: What has failed, and ``rank``: on which rank.
        """
        for state in self._ranks.values():
            state.peer.send({"kind": "watch.end", "reason": reason, "sentence": sentence, "rank": rank})

    # Hangs -------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Look at the time; called a few times a second."""
        self._now = now
        self._save.look(now)
        running = self._running()
        if not running or (self._failed_at is not None and now - self._failed_at < FAILED_LEAVE_S):
            return
        # One rank that gets something done shows that the run does not stand still.
        progressed = max(state.progressed for state in running.values())
        if self._question is not None:
            self._judge(self._question, running, progressed, now)
        elif self._hang is not None:
            self._follow(self._hang, running, progressed, now)
        elif now - progressed >= SUSPICION_SHARE * self._limit_s(running) and now >= self._next_question:
            self._ask_ranks(running, now)
        if now >= self._next_stragglers:
            self._next_stragglers = now + STRAGGLERS_EVERY_S
            self._name_stragglers(running)
        if now >= self._next_report and self._world_size > 1:
            # The message grows with the ranks, so with many it comes less often.
            self._next_report = now + max(TELL_EVERY_S, self._world_size / 100)
            self._tell_first("ranks", **totals_of_ranks(self._ranks, self._world_size))

    def _tell_first(self, verb: str, **values: object) -> None:
        """Tell rank 0, which writes down what the run does."""
        state = self._ranks.get(0)
        if state is not None and 0 not in self._ended:
            state.peer.send({"kind": f"watch.{verb}", **values})

    def _limit_s(self, running: Mapping[int, WatchedRank]) -> float:
        usual = max(state.slowest_s for state in running.values())
        return max(self._settings.hang_after_s, USUAL_STEPS * usual)

    def _ask_ranks(self, running: Mapping[int, WatchedRank], now: float) -> None:
        self._questions += 1
        self._question = _Question(self._questions, now)
        # Also those that are done: what they entered last may be what the others wait for.
        for rank, state in self._ranks.items():
            if rank in running or state.is_done:
                state.peer.send({"kind": "watch.explain", "question": self._questions})

    def _judge(
        self, question: _Question, running: Mapping[int, WatchedRank], progressed: float, now: float
    ) -> None:
        if now - question.asked < ANSWER_LIMIT_S and any(
            # one that was heard of lately may only be slow to answer: on a busy machine, many are
            now - question.asked < SOON_S or now - state.heard < SILENT_AFTER_S
            for rank, state in running.items()
            if rank not in question.answers
        ):
            return
        self._question = None
        # Something got done while the ranks were asked.
        if progressed >= question.asked:
            return
        finding = self._finding(question, running, now)
        if self._hang is not None:
            self._confirm(finding, now)
        elif self._is_to_be_named(finding, running, now - progressed):
            self._hang = _Hang(finding, progressed)
            sentence = f"{finding.sentence} No rank has made progress for {now - progressed:.0f} s."
            self._say(sentence)
            self._tell_first("news", event="hang", sentence=sentence, rank=next(iter(finding.ranks), None))
        else:
            self._next_question = now + 1.0

    def _finding(self, question: _Question, running: Mapping[int, WatchedRank], now: float) -> Finding:
        facts: list[Evidence | Silent] = []
        for rank, state in running.items():
            answer = question.answers.get(rank)
            if answer is None:
                facts.append(self._silent(rank, state, now))
            else:
                # whoever waits in end_training leaves the others their time
                facts.append(replace(answer, waits=False) if state.is_ending else answer)
        out = dict(self._ended)
        for rank, state in self._ranks.items():
            if state.is_done and rank not in out:
                out[rank] = Ended(rank, "has called end_training", question.answers.get(rank))
        for rank, state in self._vanished.items():
            if rank not in out and rank not in self._ranks:
                facts.append(self._silent(rank, state, now))
        return diagnose(facts, self._world_size, out)

    def _is_to_be_named(self, finding: Finding, running: Mapping[int, WatchedRank], still_s: float) -> bool:
        if not finding.waiting:
            # a rank that is left alone, or that the others wait for in end_training, takes the time that it needs
            if len(running) < self._world_size or any(state.is_ending for state in running.values()):
                return False
            if finding.cause not in NAMED_THOUGH_NOBODY_WAITS:
                return still_s >= NOBODY_WAITS_FACTOR * self._limit_s(running)
        has_started = any(state.steps or state.boundaries for state in self._ranks.values())
        return has_started or finding.cause in CERTAIN or still_s >= self._settings.startup_s

    def _silent(self, rank: int, state: WatchedRank, now: float) -> Silent:
        here = state.host == platform.node()
        known = state_of(state.pid) if here else self._states.get(state.pid, "unknown")
        return Silent(rank, state.host, state.pid, now - state.heard, known)

    def _follow(self, hang: _Hang, running: Mapping[int, WatchedRank], progressed: float, now: float) -> None:
        if progressed > hang.since:
            self._say(f"The ranks went on after {progressed - hang.since:.0f} s.")
            self._hang = None
            return
        if self.verdict is None and now >= max(hang.since + self._lasts_s(hang.finding), self._next_question):
            # What was true when it was named may not be any more.
            self._ask_ranks(running, now)

    def _lasts_s(self, finding: Finding) -> float:
        """How long what was found may last."""
        if finding.cause == "ended" and self._ended.keys() >= set(finding.ranks):
            # A process that has ended never comes.
            return 0.0
        if finding.is_lasting and self._hang is not None and finding.sentence == self._hang.finding.sentence:
            return min(LASTING_SHARE * self._settings.hang_after_s, self._timeout_s())
        return self._timeout_s()

    def _timeout_s(self) -> float:
        limit = self._settings.hang_timeout_s
        return limit if self.steps else max(limit, self._settings.startup_s)

    def _confirm(self, finding: Finding, now: float) -> None:
        """The hang has lasted too long, unless it turns out that no rank waits for another, or may come yet."""
        assert self._hang is not None
        if finding.waiting and now - self._hang.since >= self._lasts_s(finding):
            self.verdict = finding
        self._next_question = now + self._settings.hang_after_s

    def _name_stragglers(self, running: Mapping[int, WatchedRank]) -> None:
        if len(running) < 2 or any(state.step_s == 0 for state in running.values()):
            return
        step_s = max(state.step_s for state in running.values())
        found = find_stragglers({rank: state.local_s for rank, state in running.items()}, step_s)
        for straggler in found:
            if straggler.rank not in self._named_stragglers:
                sentence = (
                    f"Rank {straggler.rank} on {running[straggler.rank].host} is a straggler: its batches and "
                    f"forward passes take {straggler.ratio:.1f} times as long as those of the other ranks "
                    f"({1000 * running[straggler.rank].local_s:.0f} ms of a step), which wait for it. Look at "
                    "what else runs on that machine, and at the data of this rank."
                )
                self._say(sentence)
                self._tell_first("news", event="slow", sentence=sentence, rank=straggler.rank)
        self._named_stragglers = {straggler.rank for straggler in found}
