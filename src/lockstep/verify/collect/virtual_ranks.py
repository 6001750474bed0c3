"""One process that trains on the batches of several ranks, one after another, as if each were there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from torch import Tensor

from lockstep.comm.tree import concatenate, map_tensors
from lockstep.data.loader import PreparedLoader
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.runtime.seed import rng_state, set_rng_state
from lockstep.runtime.step import BatchCounts, StepState
from lockstep.verify.collect.batch_position import BatchPosition
from lockstep.verify.collect.rank_buffers import RankBuffers
from lockstep.words import count


@dataclass(frozen=True)
class RanksInTurn:
    """What one process that stands for several ranks has to know of its run.

    Attributes:
        ranks: At least 2.
        step: Of the script's ``Accelerator``.
        models: The prepared ones: a list that grows.
        seed: Of the run.
        splits_batches: Loaders give global batches, of which each rank has a slice.
        data_ended: Called where some ranks would have a batch that others do not have, or a shorter one; gets a few
            words on what the epoch ends with.
        refuse: Ends the run, with a sentence on why one process cannot stand for several ranks.
    """

    ranks: int
    step: StepState
    models: Sequence[ParallelModel]
    seed: int
    splits_batches: bool
    data_ended: Callable[[str], None]
    refuse: Callable[[str], None]


LEFT = (
    "The script leaves its loop over a loader after {batches} batches, before the epoch ends, and begins another. "
    "One process has the batches of {ranks} ranks in this loop, so that it leaves it earlier than each of them."
)


def batches_for(batches: int, ranks: int) -> str:
    """Return what an epoch ends with."""
    return f"{count(batches, 'batch', 'batches')} for {ranks} ranks"


class SequentialRanks(BatchPosition):
    """The place of a reference that stands for several ranks.

    A prepared loader of one process hands out batches in the order in which the ranks are given them: the first to rank
    0, the second to rank 1, ... So many in turn are one micro-batch of all ranks. With each of them the generators are
    seeded as the rank seeds its own, and models have that rank's buffers.
    """

    has_all_ranks = True

    def __init__(self, turns: RanksInTurn) -> None:
        super().__init__(0, turns.models, turns.seed)
        self.ranks = turns.ranks
        self._state = turns.step
        self._turns = turns
        self._is_in_loop = False
        # After how many batches the script left its loop.
        self._left = 0
        self.buffers = RankBuffers(turns.ranks)

    @property
    def share(self) -> float:
        return 1 / self.ranks

    def stepped(self) -> None:
        super().stepped()
        self.buffers.stepped()

    def _batches_of(self, loader: PreparedLoader, batches: Iterator[object]) -> Iterator[object]:
        return self.batches(self._whole_rounds(loader, self._parts_of_ranks(batches)))

    def _whole_rounds(self, loader: PreparedLoader, batches: Iterator[object]) -> Iterator[object]:
        for batch in batches:
            if self._is_trained_on():
                self._check_round(loader)
            yield batch

    def batches(self, batches: Iterator[object]) -> Iterator[object]:
        # A script may validate inside of its loop for training.
        outer, handed, trained = self._is_in_loop, self._all_handed, self._all_trained
        self._handed, self._is_in_loop = self._trained, True
        try:
            for batch in batches:
                if self._is_trained_on():
                    if self._left:
                        self._turns.refuse(LEFT.format(batches=self._left, ranks=self.ranks))
                    self._hand_out(batch)
                yield batch
        except GeneratorExit:
            # It was no look at a first batch.
            if self._all_trained > trained:
                self._left = self._all_handed - handed
            raise
        finally:
            self._is_in_loop = outer
        self._seed_for(self._all_handed // self.ranks, -1)

    def _parts_of_ranks(self, batches: Iterator[object]) -> Iterator[object]:
        for batch in batches:
            if not self._turns.splits_batches or not self._is_trained_on():
                yield batch
                continue
            active, counts = self._state.active, self._state.counts
            for rank in range(self.ranks):
                # Counts of the whole batch: a short one is not handed out.
                if active is not None and counts is not None:
                    rows = counts.rows[0] // self.ranks
                    active.counts = BatchCounts((rows,), (rows,))
                yield map_tensors(partial(self._slice, rank), batch)

    def _slice(self, rank: int, tensor: Tensor) -> Tensor:
        return tensor.chunk(self.ranks)[rank]

    def _check_round(self, loader: PreparedLoader) -> None:
        """Stop where ranks would fill up what is missing with samples of the epoch's beginning."""
        if not self._state.end_of_data:
            return
        counts, size = self._state.counts, loader.batch_size
        if size is not None and self._turns.splits_batches:
            size //= self.ranks
        is_short = counts is not None and size is not None and counts.rows[0] < size
        number = self._handed % self.ranks + 1
        if counts is not None and is_short:
            self._turns.data_ended(f"a batch of {count(counts.rows[0], 'row')} for a rank, not {size}")
        elif number < self.ranks and not self._turns.splits_batches:
            self._turns.data_ended(batches_for(number, self.ranks))

    def _begin_batch(self, number: int, of_all: int) -> None:
        # Batch i is micro-batch i // ranks of rank i % ranks, with the numbers that the rank itself draws.
        self._turn_to(number % self.ranks)
        super()._begin_batch(number // self.ranks, of_all // self.ranks)

    def _turn_to(self, rank: int) -> None:
        """Let the next batch be one of ``rank``."""
        self.buffers.turn(rank)
        self.data_rank = rank
        self._state.backward_calls = 0


class WholeBatches(BatchPosition):
    """The place of a reference that has the batches of all ranks as one."""

    def __init__(self, turns: RanksInTurn) -> None:
        super().__init__(0, turns.models, turns.seed)
        self._batches = 1 if turns.splits_batches else turns.ranks

    def _batches_of(self, loader: PreparedLoader, batches: Iterator[object]) -> Iterator[object]:
        return self.batches(self._joined(batches))

    def _joined(self, batches: Iterator[object]) -> Iterator[object]:
        while len(parts := list(islice(batches, self._batches))) == self._batches:
            yield concatenate(parts)


class AccumulatedRanks(SequentialRanks):
    """Of a script that was told to accumulate over so many more batches, and divides its losses accordingly."""

    @property
    def divided(self) -> int:
        return self.ranks


class VirtualRanks(SequentialRanks):
    """Of a script with a loop of its own: optimizers wait here for the batches of all ranks.

    They step when each rank has had as many batches as the script takes for a step, which shows when it first asks for
    one. A script without a loader makes one batch for each step: there the turn goes on when it has asked all
    optimizers to step, and each rank has its own stream of random numbers.

    Args:
        optimizers: The prepared ones: a list that grows.

    Attributes:
        schedulers_asked: How often any scheduler was asked to step, after the first backward.
    """

    def __init__(self, turns: RanksInTurn, optimizers: Sequence[object]) -> None:
        super().__init__(turns)
        self._optimizers = optimizers
        self._batches_per_step: int | None = None
        self._asked: list[object] = []
        self._has_gradients = False
        self._has_begun = False
        self._has_loader = False
        self.schedulers_asked = 0
        self._generators: list[dict[str, object]] = [{}] * turns.ranks
        turns.step.virtual_ranks = turns.ranks
        turns.step.turns = self

    def prepared(self) -> None:
        super().prepared()
        self._generators = [rng_state()] * self.ranks

    def _hand_out(self, batch: object) -> None:
        self._asked.clear()
        self._has_loader = True
        super()._hand_out(batch)

    def forward_begins(self, model: ParallelModel) -> None:
        """Note a training call of a prepared model. Refuse it where an optimizer was asked to step on this batch."""
        if self._asked:
            self._turns.refuse(
                f"The script steps an optimizer ({type(self._asked[0]).__name__}) and then trains again on the same "
                f"batch, which one process cannot do for {self.ranks} ranks one after another."
            )
        super().forward_begins(model)
        if self._state.is_in_window:
            # accumulate() has said it.
            return
        if self._has_loader:
            steps = self._batches_per_step
            number = self._trained + 1 if self._is_ahead else self._handed
            # Gradients are complete with the last rank's last batch of the step.
            self._state.sync_gradients = steps is not None and number == steps * self.ranks
        else:
            self._state.sync_gradients = self.data_rank == self.ranks - 1

    def backward_begins(self) -> None:
        super().backward_begins()
        self._has_gradients = self._has_begun = True

    def stepped(self) -> None:
        super().stepped()
        self._has_gradients = False

    def clears(self) -> bool:
        """Gradients that some ranks have brought wait for those of the others."""
        return not self._has_gradients

    def schedules(self, caller: str) -> int:
        """Return how often a scheduler steps that each rank asks in its turn; ``caller``: the module that asks."""
        if not self._has_begun or (self._has_loader and not self._is_in_loop):
            # It steps as it is made, or once for each epoch: that is one step, not one of each rank.
            return 1
        self.schedulers_asked += 1
        # This one waits for the step by itself.
        if caller == "lockstep.train.scheduler":
            return 1
        if caller == "accelerate.scheduler":
            return self.ranks if self._state.sync_gradients else 0
        return int(self.schedulers_asked % self.ranks == 0)

    def step(self, optimizer: object, step_if_due: Callable[[], object]) -> object:
        """See ``Turns``."""
        number = self._trained if self._is_ahead else self._handed
        if self._has_loader and self._batches_per_step is None and number:
            self._batches_per_step = number
        result = step_if_due()
        self._asked.append(optimizer)
        if not self._has_loader and len(self._asked) >= len(self._optimizers):
            self._next_without_loader()
        return result

    def _next_without_loader(self) -> None:
        self._asked.clear()
        # Each rank's own stream of random numbers goes on where it stopped in its last turn.
        self._generators[self.data_rank] = rng_state()
        self._turn_to((self.data_rank + 1) % self.ranks)
        set_rng_state(self._generators[self.data_rank])
