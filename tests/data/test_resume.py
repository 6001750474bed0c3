"""The audit of positions: stop anywhere, go on with any number of ranks, and every sample comes exactly once.

Ranks are played one by one in this process. The oracle is the order itself, as a list made by plain torch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lockstep.data_loader import PreparedLoader
from tests.data.helpers import Numbers, SizedStream, Stream, consume, prepare, rows_of, shuffled

SEED = 3
SAME, CHANGED = [(1, 1), (2, 2)], [(2, 1), (1, 2), (2, 4)]
IN_EVERY_WORLD = ("ragged end", "stream")


class Growing:
    """A batch sampler whose batches have 1, 2, 3, 1, 2, 3, ... rows, beginning with another one in each epoch."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter(growing_batches(self.n, self.epoch))

    def __len__(self) -> int:
        return len(growing_batches(self.n, 0))


def growing_batches(n: int, epoch: int) -> list[list[int]]:
    rows = shuffled(n, 100 + epoch)
    batches, size = [], 1
    while rows:
        batches.append(rows[:size])
        rows, size = rows[size:], size % 3 + 1
    return batches


class Columns(Numbers):
    """Takes a list of indices, as the datasets library does."""

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(index)


@dataclass(frozen=True)
class Kind:
    """A loader, how it is prepared, and the order of its samples in an epoch. ``stops`` for each pair of worlds."""

    loader: Callable[[int], DataLoader[Any]]
    order: Callable[[int], list[int]]
    options: dict[str, Any] = field(default_factory=dict)
    drops_last: bool = False
    ordered: bool = True
    stops: int = 15


def by_epoch(n: int) -> Callable[[int], list[int]]:
    return lambda epoch: shuffled(n, SEED + epoch)


def in_sequence(n: int) -> Callable[[int], list[int]]:
    return lambda _: list(range(n))


KINDS = {
    "shuffled": Kind(lambda w: DataLoader(Numbers(48), 4, shuffle=True), by_epoch(48)),
    "same global batch": Kind(lambda w: DataLoader(Numbers(45), 8 // w, shuffle=True), by_epoch(45)),
    "other global batch": Kind(lambda w: DataLoader(Numbers(45), 2 + w, shuffle=True), by_epoch(45)),
    "ragged end": Kind(lambda w: DataLoader(Numbers(43), 3, shuffle=True), by_epoch(43)),
    "uneven": Kind(lambda w: DataLoader(Numbers(43), 3, shuffle=True), by_epoch(43), {"even_batches": False}),
    "split": Kind(lambda w: DataLoader(Numbers(43), 8, shuffle=True), by_epoch(43), {"split_batches": True}),
    "uneven split": Kind(
        lambda w: DataLoader(Numbers(42), 8), in_sequence(42), {"split_batches": True, "even_batches": False}
    ),
    "drop last": Kind(
        lambda w: DataLoader(Numbers(43), 3, shuffle=True, drop_last=True), by_epoch(43), drops_last=True
    ),
    "batch sampler": Kind(
        lambda w: DataLoader(Numbers(43), batch_sampler=Growing(43)),
        lambda epoch: [row for batch in growing_batches(43, epoch) for row in batch],
    ),
    "batch sampler as sampler": Kind(
        lambda w: DataLoader(
            Columns(43), batch_size=None, sampler=BatchSampler(SequentialSampler(range(43)), 4, False)
        ),
        in_sequence(43),
    ),
    "workers": Kind(lambda w: DataLoader(Numbers(30), 3, shuffle=True, num_workers=2), by_epoch(30), stops=1),
    "stream": Kind(lambda w: DataLoader(Stream(43), 3), in_sequence(43)),
    "split stream": Kind(lambda w: DataLoader(SizedStream(43), 8), in_sequence(43), {"split_batches": True}),
    "uneven stream": Kind(lambda w: DataLoader(Stream(43), 3), in_sequence(43), {"even_batches": False}),
    "drop last of a stream": Kind(
        lambda w: DataLoader(Stream(43), 3, drop_last=True), in_sequence(43), drops_last=True
    ),
    "striped stream": Kind(
        lambda w: DataLoader(Stream(31, striped=True), 2, num_workers=2),
        in_sequence(31),
        ordered=False,
        stops=1,
    ),
    "unequal stripes": Kind(
        lambda w: DataLoader(Stripes([3, 17]), 2, num_workers=2), in_sequence(20), ordered=False, stops=1
    ),
}


class Stripes(Stream):
    """The worker processes have different numbers of samples: 0 to a - 1, a to b - 1, ..."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sum(sizes))
        self.sizes = sizes

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        first = sum(self.sizes[: worker.id])
        return iter(range(first, first + self.sizes[worker.id]))


def ranks_of(kind: Kind, world: int) -> list[PreparedLoader]:
    return [prepare(kind.loader(world), rank, world, data_seed=SEED, **kind.options) for rank in range(world)]


def advance(loader: PreparedLoader, steps: int) -> tuple[list[Any], Any]:
    """What a loop receives in its first steps, and the loop, still in its last one."""
    step = loader._parts.step
    loop = iter(loader)
    seen = []
    for _ in range(steps):
        batch = next(loop, None)
        if batch is None:
            break
        seen.append((rows_of(batch), step.counts, step.end_of_data))
    return seen, loop


def samples_in(ranks: list[list[Any]]) -> list[int]:
    """The samples that the ranks got, step by step and rank by rank, without those that only pad."""
    samples = []
    for i in range(max(len(seen) for seen in ranks)):
        for rank, seen in enumerate(ranks):
            if i < len(seen):
                rows, counts, _ = seen[i]
                samples += rows if counts is None else rows[: counts.real[rank]]
    return samples


def states_for(world: int, states: list[Any]) -> list[Any]:
    """As a checkpoint hands them out: each rank its own, or all of them that of rank 0."""
    states = [json.loads(json.dumps(state)) for state in states]
    return states if len(states) == world else [states[0]] * world


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [(before, after, name) for name in IN_EVERY_WORLD for before, after in SAME + CHANGED]
    + [
        (*worlds[number % len(worlds)], name)
        for number, name in enumerate(KINDS)
        if name not in IN_EVERY_WORLD
        for worlds in (SAME, CHANGED)
    ],
)
def test_every_sample_comes_exactly_once_wherever_a_run_stops(name, before, after):
    kind = KINDS[name]
    draw = random.Random(f"{name} {before} {after}")
    steps_of_epoch = len(consume(ranks_of(kind, before)[0]))
    for _ in range(kind.stops):
        epoch, steps = draw.randrange(2), draw.randrange(steps_of_epoch + 1)
        first = ranks_of(kind, before)
        seen, loops, states = [], [], []
        for loader in first:
            loader.set_epoch(epoch)
            batches, loop = advance(loader, steps)
            seen.append(batches)
            loops.append(loop)
            states.append(loader.state_dict())
        second = ranks_of(kind, after)
        for loader, state in zip(second, states_for(after, states), strict=True):
            loader.load_state_dict(state)
        if steps == steps_of_epoch:
            assert {loader.epoch for loader in second} == {epoch + 1}
            assert_whole(kind, epoch, samples_in(seen), total_of(first[0]))
            remaining = [consume(loader) for loader in second]
            assert_whole(kind, epoch + 1, samples_in(remaining), total_of(second[0]))
            continue
        remaining = [consume(loader) for loader in second]
        behind, later = samples_in(seen), samples_in(remaining)
        order = kind.order(epoch)
        if kind.drops_last:
            total = total_of(second[0])
            order = order[: len(behind) + (len(order) - len(behind)) // total * total]
        assert len(behind) + len(later) == len(order)
        if kind.ordered:
            assert behind + later == order
        else:
            assert sorted(behind + later) == sorted(order)
        if before == after:
            whole = ranks_of(kind, before)
            for loader, rank_seen, rank_remaining in zip(whole, seen, remaining, strict=True):
                loader.set_epoch(epoch)
                assert rank_seen + rank_remaining == consume(loader)
        for loader in second:
            assert loader.epoch == epoch + 1


def total_of(loader: PreparedLoader) -> int:
    return loader.total_batch_size or 1


def assert_whole(kind: Kind, epoch: int, samples: list[int], total: int) -> None:
    order = kind.order(epoch)
    if kind.drops_last:
        order = order[: len(order) // total * total]
    assert samples == order if kind.ordered else sorted(samples) == sorted(order)


def test_the_last_round_is_completed_with_the_beginning_of_the_epoch_in_another_world_too():
    [first] = ranks_of(Kind(lambda w: DataLoader(Numbers(10), 2, shuffle=True), by_epoch(10)), 1)
    _, loop = advance(first, 3)
    order = shuffled(10, SEED)
    parts = []
    for rank in range(3):
        loader = prepare(DataLoader(Numbers(10), 2, shuffle=True), rank, 3, data_seed=SEED)
        loader.load_state_dict(first.state_dict())
        [(rows, counts, last)] = consume(loader)
        assert (counts.rows, counts.real, last) == ((2, 2, 2), (2, 2, 0), True)
        parts += rows
    assert parts == [*order[6:], *order[:2]]
    del loop
