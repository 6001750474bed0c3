"""Reads an iterable dataset that each process, or each of its workers, deals: position, generators, counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import cast

import torch
from torch.utils.data import DataLoader, IterDataPipe

from lockstep.data.drawn import Drawing
from lockstep.data.position import nothing
from lockstep.data.readers import GlobalBatches, ReadRound, ReadStart, new_round, seed_workers
from lockstep.data.rng import PrivateDraws, States, draw_privately, mixed_seed
from lockstep.data.stream import ShardedStream, WorkerMessage
from lockstep.data.worker_states import SentStates, WorkerStates


class StreamReader:
    """Reads a ``ShardedStream``; the counts travel with the batches, also out of worker processes.

    ``own`` is the generator of the user's loader. With ``tells`` workers persist that torch has seeded.
    """

    def __init__(
        self,
        inner: DataLoader[object],
        stream: ShardedStream,
        keeps_inner_state: bool,
        own: torch.Generator | None = None,
        tells: bool = False,
    ) -> None:
        self.inner = inner
        self.stream = stream
        self.keeps_inner_state = keeps_inner_state
        # Batches of one worker never overtake each other, and each worker's are counted.
        self.has_position = True
        self.own = own
        self.tells = stream._tells = tells
        self._begun_at = WorkerStates.of(inner.num_workers)
        self._ended_at = WorkerStates.of(inner.num_workers)
        self._loaded: WorkerStates | None = None
        self._are_made = False
        self._made_at: States | None = None
        # Batches of this epoch that were handed over; None: all of them, or nobody knows.
        self._handed_over: int | None = None

    def read(self, begin: ReadStart) -> GlobalBatches:
        seed_workers(self.inner, begin, self.own)
        start = self.stream._stream_start
        if begin.inner is not None:
            # The dataset leaves out by itself what is behind, and torchdata knows whose turn it is.
            start.give(begin.seed, begin.epoch, nothing(self.inner.num_workers), False)
            self.inner.load_state_dict(begin.inner)  # type: ignore[attr-defined]
        elif begin.drawing is None:
            start.give(begin.seed, begin.epoch, begin.behind, False)
        if begin.drawing is not None:
            source, draws = self._begun(begin, begin.drawing)
            if draws is None:
                return self._one_behind(zip(source, repeat(None), repeat(None), strict=False), begin)
            messages = self._drawn(source, begin.drawing, draws)
            return self._with_generators(self._one_behind(messages, begin), draws)
        seeded: Iterator[tuple[WorkerMessage, dict[str, object] | None]] = self._messages()
        if self.inner.num_workers == 0:
            # Reading ahead must not draw numbers that the loop draws too, nor must reading again.
            seed = mixed_seed(begin.seed, begin.epoch, 0)
            seeded = draw_privately(seeded, seed, block_size=1, device=None)
        return self._one_behind(((message, inner, None) for message, inner in seeded), begin)

    def _messages(self) -> Iterator[tuple[WorkerMessage, dict[str, object] | None]]:
        for message in self.inner:
            yield message, self.inner.state_dict() if self.keeps_inner_state else None  # type: ignore[attr-defined]

    # -- what torch's loader would draw --------------------------------------------------------------

    def _begun(
        self, begin: ReadStart, drawing: Drawing
    ) -> tuple[Iterator[WorkerMessage], PrivateDraws | None]:
        """The messages, and the draws that read them in this process."""
        loaded, self._loaded = self._loaded, None
        if not self._are_made:
            self.stream._restored = loaded
        is_new = not (self.inner.persistent_workers and self._are_made)
        made_at = loaded.born if loaded is not None and loaded.born is not None else None
        with drawing.generators.at(made_at) if made_at is not None and is_new else drawing.beginning():
            shared_seed = self._shared_seed()
            before = None if is_new else self._asked_before()
            self.stream._stream_start.give(shared_seed, begin.epoch, begin.behind, True, before)
            source = iter(self.inner)
            if self.inner.num_workers and is_new:
                # torch's loader draws it for its workers once more.
                self._shared_seed()
        if is_new and self.inner.persistent_workers:
            self._are_made = True
            self._made_at = drawing.start if made_at is None else made_at
            self._begun_at = replace(self._begun_at, born=made_at)
        else:
            self._begun_at = replace(self._begun_at, born=self._made_at)
        if self.inner.num_workers:
            return source, None
        return source, self._private(drawing)

    def _asked_before(self) -> list[int] | None:
        """How many batches torch's loader would have asked each worker for, of an epoch that was left midway.

        Of one behind another as they are taken; so many ahead from the beginning. Where a worker has come to its end
        by then, torch's loader asks the others as they happen to answer.
        """
        taken, self._handed_over = self._handed_over, None
        if taken is None or self.stream._plan.world_size > 1:
            return None
        workers = self.inner.num_workers
        # torch's loader keeps so many batches of each worker on their way.
        asked = taken + workers * cast(int, self.inner.prefetch_factor)
        return [len(range(worker, asked, workers)) for worker in range(workers)]

    def _shared_seed(self) -> int:
        """What torch's loader draws for a data pipe."""
        if not isinstance(self.stream._dataset, IterDataPipe):
            return 0
        return int(torch.empty((), dtype=torch.int64).random_(generator=self.inner.generator).item())

    def _private(self, drawing: Drawing) -> PrivateDraws:
        """Reading ahead must not draw what the loop draws, nor must reading again."""
        draws = PrivateDraws(drawing.generators, [])
        draws.shown = drawing.shown or []
        return draws

    def _drawn(
        self, source: Iterator[WorkerMessage], drawing: Drawing, draws: PrivateDraws
    ) -> Iterator[tuple[WorkerMessage, dict[str, object] | None, States | None]]:
        if drawing.first is None:
            drawing.first = drawing.generators.read() if drawing.private is None else drawing.private.states
        draws.states = drawing.first
        draws.shown = drawing.shown or drawing.first
        while True:
            with draws.hidden():
                following = next(source, None)
            if following is None:
                return
            yield following, None, draws.states

    def _with_generators(self, batches: GlobalBatches, draws: PrivateDraws) -> GlobalBatches:
        """``dealt``, with the generators at each of them where torch's loader would have brought them."""
        for parts, this in batches:
            if this.states is not None:
                draws.show(this.states)
            yield parts, this
        draws.show(draws.states)

    def worker_states(self, is_midway: bool) -> WorkerStates | None:
        if self._loaded is not None:
            return self._loaded
        if not (self.tells and self._are_made):
            return None
        return self._begun_at if is_midway else replace(self._ended_at, born=self._made_at)

    def load_worker_states(self, states: WorkerStates | None) -> None:
        fits = states is not None and self.tells and len(states.states) == self.inner.num_workers
        self._loaded = states if fits else None

    # -- rounds ---------------------------------------------------------------------------------------

    def _one_behind(
        self,
        messages: Iterator[tuple[WorkerMessage, dict[str, object] | None, States | None]],
        begin: ReadStart,
    ) -> GlobalBatches:
        """One round behind ``messages``, because only the end of a stream says which one is the last."""
        behind = begin.behind
        left_out = 0
        pending: tuple[Sequence[object], ReadRound] | None = None
        others_go_on = False
        reported: set[int] = set()
        knows = not any((*behind.base, *behind.rounds, behind.turn, left_out))
        self._handed_over = 0 if knows and not begin.left_out else None
        for (worker, samples, batches, counts), inner, states in messages:
            if isinstance(batches, SentStates):
                known = self._ended_at if worker in reported else self._begun_at
                known.states[worker] = batches.states()
                reported.add(worker)
                continue
            if not samples:
                continue
            behind = behind.after(worker, samples)
            # Some of these ranks have no batch in this round, which is the last one of this worker.
            if batches is None:
                others_go_on = True
                continue
            if left_out < begin.left_out:
                left_out += 1
                continue
            if pending is not None:
                self._hands_over()
                yield pending
            pending = batches, new_round((counts, False, behind, None, inner, states))
            others_go_on = False
        if pending is not None:
            self._hands_over()
            parts, this = pending
            yield parts, this._replace(last=True, behind=this.behind if others_go_on else None)
        self._handed_over = None

    def _hands_over(self) -> None:
        if self._handed_over is not None:
            self._handed_over += 1
