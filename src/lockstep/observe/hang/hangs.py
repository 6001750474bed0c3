"""A hang: the ranks are asked, what they say is judged, it is named, followed, and at last ends the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from lockstep.observe.hang.diagnosis import EndedRank, Finding, Silent, diagnose
from lockstep.observe.hang.processes import ProcessState, machine_of_process, process_state
from lockstep.observe.hang.ranks import WatchedRank, WatchedRound
from lockstep.observe.hang.records import Evidence, Message

# A hang is to be named before HANG_AFTER: suspicion comes earlier, because asking and answering take time.
SUSPICION_SHARE = 0.7
# In multiples of the slowest usual step.
USUAL_STEPS = 5
# Answers are waited for SOON_S in any case, and up to ANSWER_LIMIT_S from ranks that were heard of lately.
SOON_S = 0.4
SILENT_AFTER_S = 2.8
ANSWER_LIMIT_S = 5.0
# Answers are of different moments: what a rank did is certain where it did the same at two looks, of which the second
# was asked for after the first was there, and where so much time was between them in which it had a processor.
AGAIN_AFTER_S = 0.2
AWAKE_S = 0.4
# A rank that does not answer may only have got no processor for it.
SILENT_AWAKE_S = 2.0
# Where nobody waits, it is mostly a long evaluation or save.
NOBODY_WAITS_FACTOR = 12.0
# What cannot be a rank that is only busy, or that starts slowly: named at once.
CERTAIN = ("mismatch", "stopped", "ended")
NAMED_THOUGH_NOBODY_WAITS = ("stopped", "data")
# Of a process that does not answer, these say enough.
CERTAIN_STATES = ("gone", "zombie", "stopped")
# What cannot end by itself is ended when it was still so at this share of HANG_AFTER: named before, looked at again.
LASTING_SHARE = 2.0


@dataclass(frozen=True)
class WatchSettings:
    """Limits.

    Attributes:
        hang_after_s: The least time without progress that is a hang.
        hang_timeout_s: How long a hang may last.
        startup_s: Until the first optimizer step, or some batches of an evaluation, both are at least this, since ranks
            wait for one that imports, downloads or compiles.
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
class _Look:
    """What the ranks did since a moment, as far as anybody can tell."""

    since: float
    facts: dict[int, Evidence | Silent]

    def has_moved(self, facts: Mapping[int, Evidence | Silent]) -> bool:
        """Return whether a collective was begun or has ended since then."""
        return any(
            isinstance(one, Evidence) and isinstance(before, Evidence) and one.has_moved(before)
            for rank, one in facts.items()
            if (before := self.facts.get(rank)) is not None
        )

    def waited_s(self, facts: Mapping[int, Evidence | Silent]) -> float:
        """Return how long some rank has waited for a processor since then."""
        known = ((one, self.facts.get(rank)) for rank, one in facts.items())
        return max(
            (one.waited_s - before.waited_s for one, before in known if before is not None), default=0.0
        )


@dataclass
class _Hang:
    """One that was named; ``since`` is when anything got done last."""

    finding: Finding
    since: float


class HangJudge:
    """Judges one set of workers.

    Args:
        round: What is known of them.
        say: Prints one sentence for people.
        numbers: Of questions; no two of a launch have the same one.

    Attributes:
        verdict: A hang that has lasted too long; None: there is none.
    """

    def __init__(
        self,
        settings: WatchSettings,
        round: WatchedRound,
        say: Callable[[str], None],
        numbers: Iterator[int],
    ) -> None:
        self._settings = settings
        self._round = round
        self._say = say
        self._numbers = numbers
        self._machine = machine_of_process()
        self._question: _Question | None = None
        self._next_question = 0.0
        self._hang: _Hang | None = None
        self._look: _Look | None = None
        self._moved = 0.0
        self.verdict: Finding | None = None

    def take_answer(self, rank: int, question: object, evidence: Message) -> None:
        """Take in what a rank says of itself; of an earlier question it is left aside."""
        if self._question is not None and question == self._question.number:
            self._question.answers[rank] = Evidence.from_message(evidence)

    def forget_answers(self) -> None:
        """Forget the answers, as a rank has ended: they may be older than that."""
        self._question = None

    def look(self, running: Mapping[int, WatchedRank], now: float) -> None:
        """Look at the time, and at the ranks that are in training."""
        # One rank that gets something done shows that the run does not stand still, and so does a collective.
        progressed = max(self._moved, *(state.progressed for state in running.values()))
        if self._look is not None and progressed > self._look.since:
            self._look = None
        if self._question is not None:
            self._judge(self._question, running, progressed, now)
        elif self._hang is not None:
            self._follow(self._hang, running, progressed, now)
        elif now - progressed >= SUSPICION_SHARE * self._limit_s(running) and now >= self._next_question:
            self._ask_ranks(running, now)

    def _limit_s(self, running: Mapping[int, WatchedRank]) -> float:
        usual = max(state.slowest_s for state in running.values())
        return max(self._settings.hang_after_s, USUAL_STEPS * usual)

    def _ask_ranks(self, running: Mapping[int, WatchedRank], now: float) -> None:
        self._question = _Question(next(self._numbers), now)
        # Also those that are done: what they entered last may be what the others wait for.
        for rank, state in self._round.ranks.items():
            if rank in running or state.is_done:
                state.peer.send({"kind": "watch.explain", "question": self._question.number})

    def _judge(
        self, question: _Question, running: Mapping[int, WatchedRank], progressed: float, now: float
    ) -> None:
        if now - question.asked < ANSWER_LIMIT_S and any(
            # One that was heard of lately may only be slow to answer: on a busy machine, many are.
            now - question.asked < SOON_S or now - state.last_message_at < SILENT_AFTER_S
            for rank, state in running.items()
            if rank not in question.answers
        ):
            return
        self._question = None
        # Something got done while the ranks were asked.
        if progressed >= question.asked:
            return
        facts, out = self._facts(question, running, now)
        finding = diagnose(list(facts.values()), self._round.world_size, out)
        if not self._is_certain(question, facts, now):
            self._next_question = now + AGAIN_AFTER_S
        elif self._hang is not None:
            self._confirm(finding, facts, now)
        elif self._is_to_be_named(finding, running, now - progressed):
            self._hang = _Hang(finding, progressed)
            self._next_question = min(progressed + self._lasts_s(finding), now + self._settings.hang_after_s)
            sentence = f"{finding.sentence} No rank has made progress for {now - progressed:.0f} s."
            self._say(sentence)
            self._round.tell_first(
                "news", event="hang", sentence=sentence, rank=next(iter(finding.ranks), None)
            )
        else:
            self._next_question = now + 1.0

    def _is_certain(self, question: _Question, facts: dict[int, Evidence | Silent], now: float) -> bool:
        """Return whether the ranks do what they did at an earlier look, and had their processors in between."""
        silent = [one for one in facts.values() if isinstance(one, Silent)]
        if any(one.state in CERTAIN_STATES for one in silent):
            return True
        first = self._look
        if first is None or first.has_moved(facts):
            if first is not None:
                self._moved = question.asked
            self._look = _Look(question.asked, facts)
            return False
        awake_s = now - first.since - max(first.waited_s(facts), 0.0)
        return awake_s >= (SILENT_AWAKE_S if silent else AWAKE_S)

    def _facts(
        self, question: _Question, running: Mapping[int, WatchedRank], now: float
    ) -> tuple[dict[int, Evidence | Silent], dict[int, EndedRank]]:
        facts: dict[int, Evidence | Silent] = {}
        for rank, state in running.items():
            answer = question.answers.get(rank)
            if answer is None:
                facts[rank] = self._silent(rank, state, now)
            else:
                # Whoever waits in end_training leaves the others their time.
                facts[rank] = replace(answer, waits=False) if state.is_ending else answer
        out = dict(self._round.ended)
        for rank, state in self._round.ranks.items():
            if state.is_done and rank not in out:
                out[rank] = EndedRank(rank, "has called end_training", question.answers.get(rank))
        for rank, state in self._round.vanished.items():
            if rank not in out and rank not in self._round.ranks:
                facts[rank] = self._silent(rank, state, now)
        return facts, out

    def _is_to_be_named(self, finding: Finding, running: Mapping[int, WatchedRank], still_s: float) -> bool:
        if not finding.waiting:
            # A rank that is left alone, or that the others wait for in end_training, takes the time that it needs.
            if len(running) < self._round.world_size or any(state.is_ending for state in running.values()):
                return False
            if finding.cause not in NAMED_THOUGH_NOBODY_WAITS:
                return still_s >= NOBODY_WAITS_FACTOR * self._limit_s(running)
        ranks = self._round.ranks.values()
        has_started = any(one.steps or one.boundaries for one in ranks) or all(one.evaluates for one in ranks)
        return has_started or finding.cause in CERTAIN or still_s >= self._settings.startup_s

    def _silent(self, rank: int, state: WatchedRank, now: float) -> Silent:
        is_here = state.machine != "" and state.machine == self._machine
        known = process_state(state.pid) if is_here else ProcessState()
        silent_s = now - state.last_message_at
        return Silent(rank, state.host, state.pid, silent_s, known.word, known.waited_s)

    def _follow(self, hang: _Hang, running: Mapping[int, WatchedRank], progressed: float, now: float) -> None:
        if progressed > hang.since:
            self._say(f"The ranks went on after {progressed - hang.since:.0f} s.")
            self._hang = None
            return
        if self.verdict is None and now >= self._next_question:
            # What was true when it was named may not be any more.
            self._ask_ranks(running, now)

    def _lasts_s(self, finding: Finding) -> float:
        """Return how long what was found may last."""
        if finding.cause == "ended" and self._round.ended.keys() >= set(finding.ranks):
            # A process that has ended never comes.
            return 0.0
        if finding.is_lasting and self._hang is not None and finding.sentence == self._hang.finding.sentence:
            return min(LASTING_SHARE * self._settings.hang_after_s, self._timeout_s())
        return self._timeout_s()

    def _timeout_s(self) -> float:
        limit = self._settings.hang_timeout_s
        return limit if self._round.steps else max(limit, self._settings.startup_s)

    def _confirm(self, finding: Finding, facts: dict[int, Evidence | Silent], now: float) -> None:
        """End a hang that has lasted too long, unless it turns out that no rank waits for another, or may come yet."""
        assert self._hang is not None
        waited_s = 0.0 if self._look is None else max(self._look.waited_s(facts), 0.0)
        ends = self._hang.since + self._lasts_s(finding) + waited_s
        if finding.waiting and now >= ends:
            self.verdict = finding
        later = now + self._settings.hang_after_s
        self._next_question = min(ends, later) if ends > now else later
