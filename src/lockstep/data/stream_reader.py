"""Reads an iterable dataset that each process, or each of its workers, deals: position, generators, counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

import torch
from torch.utils.data import DataLoader, IterDataPipe

from lockstep.data.drawn import Drawing
from lockstep.data.readers import (
    GlobalBatches,
    PersistentWorkers,
    ReadRound,
    ReadStart,
    new_round,
    seed_workers,
)
from lockstep.data.rng import PrivateDraws, States, draw_privately, mixed_seed
from lockstep.data.stream import ShardedStream, WorkerMessage


class StreamReader:
    """Reads a ``ShardedStream``; the counts travel with the batches, also out of worker processes.

    ``own`` is the generator of the user's loader.
    """

    def __init__(
        self, inner: DataLoader[object], stream: ShardedStream, own: torch.Generator | None = None
    ) -> None:
        self.inner = inner
        self.stream = stream
        # Batches of one worker never overtake each other, and each worker's are counted.
        self.has_position = True
        self.own = own
        self.workers = PersistentWorkers(inner)

    def read(self, begin: ReadStart) -> GlobalBatches:
        seed_workers(self.inner, begin, self.own)
        if begin.drawing is not None:
            source = self._begun(begin, begin.drawing)
            if self.inner.num_workers:
                return self._one_behind(zip(source, repeat(None), strict=False), begin)
            draws = self._private(begin.drawing)
            messages = self._drawn(source, begin.drawing, draws)
            return self._with_generators(self._one_behind(messages, begin), draws)
        pipe_seed = mixed_seed(begin.seed, begin.epoch)
        self.stream._stream_start.give(begin.seed, begin.epoch, begin.behind, pipe_seed, True)
        seeded: Iterator[WorkerMessage] = iter(self.inner)
        if self.inner.num_workers == 0:
            # Reading ahead must not draw numbers that the loop draws too, nor must reading again.
            seed = mixed_seed(begin.seed, begin.epoch, 0)
            seeded = draw_privately(seeded, seed, block_size=1, device=None)
        return self._one_behind(zip(seeded, repeat(None), strict=False), begin)

    # -- what torch's loader would draw --------------------------------------------------------------

    def _begun(self, begin: ReadStart, drawing: Drawing) -> Iterator[WorkerMessage]:
        """Return the messages, begun as torch's loader begins."""
        self.workers.begin(drawing)
        with drawing.beginning():
            shared_seed = self._shared_seed()
            # Generators of workers that persist would stand where the epoch before has left them.
            persist = self.inner.persistent_workers
            self.stream._stream_start.give(begin.seed, begin.epoch, begin.behind, shared_seed, persist)
            source: Iterator[WorkerMessage] = iter(self.inner)
            if self.inner.num_workers and not self.workers.existed:
                # torch's loader draws it for its workers once more.
                self._shared_seed()
        return source

    def _shared_seed(self) -> int:
        """Return what torch's loader draws for a data pipe."""
        if not isinstance(self.stream._dataset, IterDataPipe):
            return 0
        return int(torch.empty((), dtype=torch.int64).random_(generator=self.inner.generator).item())

    def _private(self, drawing: Drawing) -> PrivateDraws:
        """Keep the draws of reading ahead, and of reading again, apart from those of the loop."""
        draws = PrivateDraws(drawing.generators, [])
        draws.shown = drawing.shown or []
        return draws

    def _drawn(
        self, source: Iterator[WorkerMessage], drawing: Drawing, draws: PrivateDraws
    ) -> Iterator[tuple[WorkerMessage, States | None]]:
        if drawing.first is None:
            drawing.first = drawing.generators.read() if drawing.private is None else drawing.private.states
        draws.states = drawing.first
        draws.shown = drawing.shown or drawing.first
        while True:
            with draws.hidden():
                following = next(source, None)
            if following is None:
                return
            yield following, draws.states

    def _with_generators(self, batches: GlobalBatches, draws: PrivateDraws) -> GlobalBatches:
        """Yield ``dealt``, with the generators at each of them where torch's loader would have brought them."""
        for parts, this in batches:
            if this.states is not None:
                draws.show(this.states)
            yield parts, this
        draws.show(draws.states)

    # -- rounds ---------------------------------------------------------------------------------------

    def _one_behind(
        self, messages: Iterator[tuple[WorkerMessage, States | None]], begin: ReadStart
    ) -> GlobalBatches:
        """Yield one round behind ``messages``, because only the end of a stream says which one is the last."""
        behind = begin.behind
        left_out = 0
        pending: tuple[Sequence[object], ReadRound] | None = None
        others_go_on = False
        for (worker, samples, batches, counts, digest), states in messages:
            if not samples:
                continue
            behind = behind.after(worker, samples, digest)
            # Some of these ranks have no batch in this round, which is the last one of this worker.
            if batches is None:
                others_go_on = True
                continue
            if left_out < begin.left_out:
                left_out += 1
                continue
            if pending is not None:
                yield pending
            pending = batches, new_round((counts, False, behind, None, states))
            others_go_on = False
        if pending is not None:
            parts, this = pending
            yield parts, this._replace(last=True, behind=this.behind if others_go_on else None)
