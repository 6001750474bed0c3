"""Decides, from what the workers of a run tell, whether they hang, who is to blame, and where all of them stop.

The handler "watch" of the launch's server. It knows neither sockets nor clocks: messages and the time are passed in,
always by one thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace

from lockstep.errors import ControlError
from lockstep.observe.hang.diagnosis import EndedRank, Finding
from lockstep.observe.hang.hangs import HangJudge, WatchSettings
from lockstep.observe.hang.ranks import (
    CommonStop,
    WatchedRank,
    WatchedRound,
    WorkerConnection,
    integer_of,
    totals_of_ranks,
)
from lockstep.observe.hang.records import Evidence, Message

TELL_EVERY_S = 1.0
# A rank that failed ends within seconds, and then its error is what ends the run.
FAILED_LEAVE_S = 15.0


class Coordinator:
    """Watches one set of workers after the other; see ``start_round``.

    Args:
        settings: Limits.
        say: Prints one sentence for people.
    """

    def __init__(self, settings: WatchSettings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._questions = itertools.count(1)
        self._now = 0.0
        self.commits = 0
        self.start_round(0)

    def start_round(self, world_size: int) -> None:
        """Expect a new set of workers; forget the ones before. ``commits`` goes on."""
        workers = self._round = WatchedRound(world_size)
        self._hangs = HangJudge(
            self._settings,
            workers,
            self._say,
            self._questions,
        )
        self._stop = CommonStop(workers)
        self._next_report = 0.0
        self._failed_at: float | None = None
        self.stopped: str | None = None

    # What the workers tell ---------------------------------------------------------------------------

    def received(self, peer: WorkerConnection, message: Message) -> None:
        """Take in one message of a worker. What does not make sense is left aside."""
        verb = str(message.get("kind", "")).partition(".")[2]
        if verb == "hello":
            self._hello(peer, message)
            return
        rank = peer.data.get("rank", -1)
        state = self._round.ranks.get(rank)
        if state is None or state.peer is not peer:
            # It is of a round that is over.
            return
        state.last_message_at = self._now
        if verb == "heartbeat":
            state.take_heartbeat(message, self._now)
        elif verb == "evidence":
            self._hangs.take_answer(rank, message.get("question"), message.get("evidence", {}))
        elif verb == "stop_wanted":
            # This is newer than the last heartbeat.
            self._note_progress(state, message)
            self.request_stop(str(message.get("cause", "a signal")))
        elif verb == "passed":
            self._note_progress(state, message)
            state.passed = integer_of(message, "boundary")
            self._stop.choose_target()
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
        """Note that a worker's connection is gone: it ended, or is ending."""
        rank = peer.data.get("rank", -1)
        if rank in self._round.ranks and self._round.ranks[rank].peer is peer:
            state = self._round.ranks.pop(rank)
            # Its process may go on, so it is judged like one that does not answer.
            if rank not in self._round.ended:
                self._round.vanished[rank] = state

    def left(self, rank: int) -> None:
        """Note that a launcher has seen that this rank's process ended with exit code 0."""
        last = self._round.ended[rank].last if rank in self._round.ended else None
        self._note_end(EndedRank(rank, "has ended with exit code 0", last))

    def _hello(self, peer: WorkerConnection, message: Message) -> None:
        rank = message.get("rank")
        if not isinstance(rank, int):
            return
        peer.data["rank"] = rank
        # Without our launcher the first worker tells how many there are.
        self._round.world_size = self._round.world_size or integer_of(message, "world_size")
        host, pid = str(message.get("host", "")), integer_of(message, "pid")
        known = self._round.vanished.pop(rank, None) or self._round.ranks.get(rank)
        if known is not None and (known.host, known.pid) == (host, pid):
            # It has connected again.
            state = replace(known, peer=peer, last_message_at=self._now, passed=None)
        else:
            machine = str(message.get("machine", ""))
            state = WatchedRank(
                peer, host, pid, last_message_at=self._now, progressed=self._now, machine=machine
            )
        self._round.ranks[rank] = state
        # The same process, which has made another Accelerator.
        if self._round.ended.pop(rank, None) is not None:
            self._round.tell_others(rank, "back")
        for other in self._round.ended:
            peer.send({"kind": "watch.left", "rank": other})
        self._stop.tell(state)

    def _note_progress(self, state: WatchedRank, message: Message) -> None:
        state.boundaries = max(
            state.boundaries, integer_of(message, "boundaries"), integer_of(message, "boundary")
        )
        state.steps = max(state.steps, integer_of(message, "steps"))

    def _bye(self, rank: int, message: Message) -> None:
        """Note that a rank ends its part of the run; after a failure the launcher finds out by itself."""
        try:
            last = Evidence.from_message(message["evidence"])
        except (KeyError, ControlError):
            last = None
        how = "has failed" if message.get("failed") is True else "has ended"
        if message.get("failed") is True:
            self._failed_at = self._now
        self._note_end(EndedRank(rank, how, last))

    def _note_end(self, ended: EndedRank) -> None:
        is_news = ended.rank not in self._round.ended and ended.how != "has failed"
        self._round.ended[ended.rank] = ended
        self._round.vanished.pop(ended.rank, None)
        if is_news:
            self._hangs.forget_answers()
            self._round.tell_others(ended.rank, "left")
        self._stop.choose_target()

    @property
    def steps(self) -> int:
        """Step boundaries that the foremost rank has passed in this round."""
        return self._round.steps

    @property
    def verdict(self) -> Finding | None:
        """A hang that has lasted too long, in this round."""
        return self._hangs.verdict

    def latest(self) -> Mapping[str, float | str]:
        """Return rank 0's newest numbers of the run. Any thread may ask."""
        state = self._round.ranks.get(0)
        return {} if state is None else state.latest

    # Stopping together -------------------------------------------------------------------------------

    def request_stop(self, cause: str) -> None:
        """Have all ranks stop at one step boundary; ``cause`` is a signal's name.

        Where no rank has made a step, ``nothing_begun`` becomes true, since there is nothing to save.
        """
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
        for state in self._round.ranks.values():
            state.peer.send({"kind": "watch.end", "reason": reason, "sentence": sentence, "rank": rank})

    # Hangs -------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Look at the time; called a few times a second."""
        self._now = now
        running = self._round.running()
        if not running or (self._failed_at is not None and now - self._failed_at < FAILED_LEAVE_S):
            return
        self._hangs.look(running, now)
        if now >= self._next_report and self._round.world_size > 1:
            # The message grows with the ranks, so with many it comes less often.
            self._next_report = now + max(TELL_EVERY_S, self._round.world_size / 100)
            self._round.tell_first("ranks", **totals_of_ranks(self._round.ranks, self._round.world_size))
