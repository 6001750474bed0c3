"""A stream that is read up to a position again: the same samples, or a refusal. The oracle is the uninterrupted run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lockstep.data_loader import PreparedLoader
from lockstep.errors import CheckpointError
from tests.data.helpers import prepare

ROWS = 24
STARTED = itertools.count(100)
"""Streams without a seed: each made in this process has another order, as those of two processes have."""

FORMS: dict[str, Callable[[int], Any]] = {
    "numbers": int,
    "texts": lambda i: f"text {i}",
    "bytes": lambda i: f"{i:09d}".encode(),
    "dictionaries": lambda i: {"image": torch.zeros(2), "label": {"id": i}},
    "tokens": lambda i: (torch.full((40,), i), 0.5),
    "arrays": lambda i: {"ids": np.full((2, 2), i, dtype=np.uint16)},
    "scalars": lambda i: [np.int64(i)],
}


class Shuffled(IterableDataset[Any]):
    def __init__(self, form: str, seed: int | None) -> None:
        self.form, self.seed = form, next(STARTED) if seed is None else seed

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        order = np.random.default_rng(self.seed).permutation(ROWS).tolist()
        return (FORMS[self.form](i) for i in order[first::step])


def loader(form: str, seed: int | None, workers: int = 0, **options: Any) -> PreparedLoader:
    dealing = {"rank": options.pop("rank", 0), "world": options.pop("world", 1)}
    options.setdefault("batch_size", 2)
    data = DataLoader(Shuffled(form, seed), num_workers=workers, collate_fn=list, **options)
    return prepare(data, dealing["rank"], dealing["world"])


def texts_of(batches: Iterator[Any]) -> list[str]:
    return [repr(sample) for batch in batches for sample in batch]


def state_after(prepared: PreparedLoader, steps: int) -> tuple[dict[str, Any], list[str]]:
    batches = iter(prepared)
    seen = texts_of(itertools.islice(batches, steps))
    return prepared.state_dict(), seen


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_goes_on_if_it_gives_the_same_samples_again(form: str) -> None:
    whole = texts_of(iter(loader(form, 1)))
    state, seen = state_after(loader(form, 1), 3)
    resumed = loader(form, 1)
    resumed.load_state_dict(state)
    assert seen + texts_of(iter(resumed)) == whole
    other = loader(form, 2)
    other.load_state_dict(state)
    with pytest.raises(CheckpointError, match="Shuffled does not give the samples up to the position again"):
        next(iter(other))


@pytest.mark.parametrize("steps", [1, 4, 5])
def test_each_worker_checks_its_own_stream(steps: int) -> None:
    whole = texts_of(iter(loader("numbers", 1, 2)))
    state, seen = state_after(loader("numbers", 1, 2), steps)
    resumed = loader("numbers", 1, 2)
    resumed.load_state_dict(state)
    assert seen + texts_of(iter(resumed)) == whole
    other = loader("numbers", None, 2)
    other.load_state_dict(state)
    with pytest.raises(CheckpointError, match="Give its shuffle a seed"):
        list(other)


@pytest.mark.parametrize(("world", "batch_size"), [(2, 1), (2, 3), (3, 2), (1, 4)])
def test_it_is_checked_on_other_ranks_and_with_another_batch_size(world: int, batch_size: int) -> None:
    whole = texts_of(iter(loader("texts", 1)))
    state, seen = state_after(loader("texts", 1), 3)
    ranks = []
    for rank in range(world):
        resumed = loader("texts", 1, rank=rank, world=world, batch_size=batch_size)
        resumed.load_state_dict(state)
        ranks.append(list(resumed))
        other = loader("texts", 2, rank=rank, world=world, batch_size=batch_size)
        other.load_state_dict(state)
        with pytest.raises(CheckpointError, match="position again"):
            next(iter(other))
    rest = texts_of(iter(part for step in zip(*ranks, strict=True) for part in step))
    assert seen + rest[: ROWS - len(seen)] == whole


def test_what_an_augmentation_draws_is_not_compared() -> None:
    class Augmented(Shuffled):
        def __iter__(self) -> Iterator[Any]:
            drawn = np.random.default_rng()
            for i in super().__iter__():
                yield {"image": drawn.integers(256, size=4, dtype=np.uint8), "x": drawn.random(3), "label": i}

    def made() -> PreparedLoader:
        return prepare(DataLoader(Augmented("numbers", 1), batch_size=2))

    whole = [label for batch in made() for label in batch["label"].tolist()]
    first = made()
    next(iter(first))
    resumed = made()
    resumed.load_state_dict(first.state_dict())
    assert [label for batch in resumed for label in batch["label"].tolist()] == whole[2:]


def test_a_stream_that_has_become_shorter_is_refused() -> None:
    class Short(Shuffled):
        def __iter__(self) -> Iterator[Any]:
            return itertools.islice(super().__iter__(), 3)

    state, _ = state_after(loader("numbers", 1), 4)
    short = prepare(DataLoader(Short("numbers", 1), batch_size=2, collate_fn=list))
    short.load_state_dict(state)
    with pytest.raises(CheckpointError, match="its data changed"):
        list(short)


def test_a_state_without_checksums_is_continued_and_then_has_them() -> None:
    state, _ = state_after(loader("numbers", 1), 3)
    old = {name: value for name, value in state.items() if name != "digests"}
    resumed = loader("numbers", 1)
    resumed.load_state_dict(old)
    assert resumed.state_dict()["digests"] is None
    assert state_after(resumed, 1)[0]["digests"] == state_after(loader("numbers", 1), 4)[0]["digests"]


def test_a_shuffle_buffer_of_datasets_needs_a_seed() -> None:
    def made(seed: int | None) -> PreparedLoader:
        table = datasets.Dataset.from_dict({"i": list(range(ROWS))})
        return prepare(DataLoader(table.to_iterable_dataset(4).shuffle(seed, buffer_size=8), batch_size=2))

    first = made(None)
    next(iter(first))
    other = made(None)
    other.load_state_dict(first.state_dict())
    with pytest.raises(CheckpointError, match="IterableDataset does not give the samples"):
        next(iter(other))


class CountsIterations(IterableDataset[int]):
    """As the data sets of MosaicML's streaming: its order is that of an epoch, which the process counts."""

    def __init__(self) -> None:
        self.next_epoch = 0

    def __iter__(self) -> Iterator[int]:
        epoch = self.next_epoch
        self.next_epoch += 1
        return iter(np.random.default_rng(epoch).permutation(ROWS).tolist())


def test_a_data_set_that_counts_its_iterations_is_told_the_epoch() -> None:
    def made() -> PreparedLoader:
        return prepare(DataLoader(CountsIterations(), batch_size=2))

    first, second = (
        [row for batch in made_once for row in batch.tolist()] for made_once in [made()] for _ in "ab"
    )
    assert first != second
    stopped = made()
    list(stopped)
    seen = [row for batch in itertools.islice(iter(stopped), 3) for row in batch.tolist()]
    resumed = made()
    resumed.load_state_dict(stopped.state_dict())
    assert seen + [row for batch in resumed for row in batch.tolist()] == second
