"""Prepared loaders over map-style data, rank by rank in one process; the oracle is plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, SequentialSampler

from lockstep import DataLoaderConfiguration
from lockstep.data import prepare_loader
from lockstep.errors import ConfigError, UsageError
from lockstep.runtime import BatchCounts, StepState
from tests.data.helpers import ALONE, Numbers, chunks, consume, prepare, real_rows_per_step, rows_of, shuffled
from tests.refusals import expect_refusal


@pytest.mark.parametrize(
    ("world", "split", "workers"),
    [(1, False, 2), (1, True, 0), (2, False, 0), (2, True, 2), (4, False, 0), (4, True, 0)],
)
def test_each_step_is_the_next_global_batch_of_the_shuffled_order(world, split, workers):
    def make():
        return DataLoader(
            Numbers(22), batch_size=8 if split else 8 // world, shuffle=True, num_workers=workers
        )

    steps = real_rows_per_step(make, world, split_batches=split, data_seed=3)
    assert steps == chunks(shuffled(22, seed=3), 8)


def test_the_last_batch_is_known_and_its_padding_counted():
    batches = consume(prepare(DataLoader(Numbers(10), batch_size=4), rank=1, world=2))
    assert batches == [
        ([4, 5, 6, 7], BatchCounts((4, 4), (4, 4)), False),
        ([2, 3, 4, 5], BatchCounts((4, 4), (2, 0)), True),
    ]


def test_in_a_world_of_one_the_ragged_last_batch_stays_ragged():
    assert consume(prepare(DataLoader(Numbers(5), batch_size=3))) == [
        ([0, 1, 2], BatchCounts((3,), (3,)), False),
        ([3, 4], BatchCounts((2,), (2,)), True),
    ]


def test_uneven_batches_leave_later_ranks_without_a_last_batch():
    make = lambda: DataLoader(Numbers(10), batch_size=4)  # noqa: E731
    first, second = (prepare(make(), rank, 2, even_batches=False) for rank in range(2))
    assert consume(first)[-1] == ([8, 9], BatchCounts((2, 0), (2, 0)), True)
    assert [rows for rows, _, _ in consume(second)] == [[4, 5, 6, 7]]
    assert (len(first), len(second)) == (2, 1)


def test_drop_last_drops_the_incomplete_round():
    loader = prepare(DataLoader(Numbers(23), batch_size=4, drop_last=True), rank=0, world=2)
    assert [rows for rows, _, _ in consume(loader)] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert len(loader) == 2
    assert loader.remainder == -1


def test_every_iteration_is_a_new_epoch_and_set_epoch_chooses_it():
    loader = prepare(DataLoader(Numbers(12), batch_size=12, shuffle=True), data_seed=5)
    assert [rows_of(batch) for _ in range(3) for batch in loader] == [shuffled(12, 5 + e) for e in range(3)]
    assert loader.epoch == 3
    loader.set_epoch(1)
    assert [rows_of(batch) for batch in loader] == [shuffled(12, 6)]


class TokenBudget:
    """A batch sampler without a fixed batch size."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __iter__(self):
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size

    def __len__(self):
        return len(self.sizes)


@pytest.mark.parametrize(("even", "workers"), [(True, 0), (False, 1)])
def test_batches_of_varying_size_are_counted_exactly(even, workers):
    def make():
        return DataLoader(Numbers(15), batch_sampler=TokenBudget([1, 5, 2, 4, 3]), num_workers=workers)

    steps = real_rows_per_step(make, 2, even_batches=even)
    assert steps == [list(range(6)), list(range(6, 12)), [12, 13, 14]]


def test_a_missing_batch_of_varying_size_is_a_whole_one_from_the_beginning():
    loader = prepare(DataLoader(Numbers(6), batch_sampler=TokenBudget([1, 2, 3])), rank=1, world=2)
    assert consume(loader)[-1] == ([0], BatchCounts((3, 1), (3, 0)), True)


class Batched(Dataset):
    """Takes a list of indices, as the datasets library does."""

    def __len__(self):
        return 10

    def __getitem__(self, indices):
        return torch.tensor(indices)


def test_a_batch_sampler_given_as_sampler_is_dealt_by_batches():
    sampler = BatchSampler(SequentialSampler(range(10)), 2, drop_last=False)
    loader = prepare(DataLoader(Batched(), sampler=sampler, batch_size=None), rank=1, world=2)
    assert [rows for rows, _, _ in consume(loader)] == [[2, 3], [6, 7], [0, 1]]
    assert (loader.batch_size, loader.total_batch_size) == (2, 4)


def test_without_automatic_batching_items_are_dealt_whole():
    batches = [torch.arange(4), torch.arange(3), torch.arange(2)]
    loader = prepare(DataLoader(batches, batch_size=None), rank=1, world=2)
    assert [(rows, counts) for rows, counts, _ in consume(loader)] == [
        ([0, 1, 2], None),
        ([0, 1, 2, 3], None),
    ]
    assert loader.batch_size is None
    assert loader.total_batch_size is None
    assert loader.remainder == -1
    alone = prepare(DataLoader(batches, batch_size=None))
    assert consume(alone)[1] == ([0, 1, 2], BatchCounts((3,), (3,)), False)


def test_it_behaves_as_the_loader_it_stands_for():
    data = Numbers(20)
    original = DataLoader(
        data,
        batch_size=4,
        collate_fn=tuple,
        num_workers=2,
        prefetch_factor=3,
        persistent_workers=True,
        timeout=9,
    )
    original.note = "kept"
    loader = prepare(original, rank=0, world=2, split_batches=True)
    assert isinstance(loader, DataLoader)
    assert loader.dataset is data
    assert loader.original is original
    assert (loader.batch_size, loader.total_batch_size, loader.total_dataset_length) == (2, 4, 20)
    assert len(loader) == 5
    assert loader.collate_fn is tuple
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 3, True)
    assert loader.timeout == 9
    assert loader.note == "kept"
    assert not hasattr(loader, "no_such_attribute")
    assert next(iter(loader)) == (0, 1)


def test_batches_move_to_the_device():
    def loader(device):
        return prepare_loader(
            DataLoader(
                Numbers(4), batch_size=2, collate_fn=lambda rows: {"rows": torch.tensor(rows), "name": "x"}
            ),
            runtime=ALONE,
            step=StepState(),
            config=DataLoaderConfiguration(),
            device=device,
        )

    batch = next(iter(loader(torch.device("meta"))))
    assert (batch["rows"].device.type, batch["name"]) == ("meta", "x")
    assert next(iter(loader(None)))["rows"].device.type == "cpu"


def test_the_step_knows_the_running_loader_also_when_the_loop_is_left():
    step = StepState()
    outer = prepare(DataLoader(Numbers(4), batch_size=2), step=step)
    inner = prepare(DataLoader(Numbers(2), batch_size=2), step=step)
    for _ in outer:
        for _ in inner:
            assert step.active.loader is inner
            assert step.end_of_data
        assert step.active.loader is outer
        assert not step.end_of_data
        break
    assert step.running == []
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for _ in outer]
    assert step.running == []


def test_end_of_dataloader_and_remainder_are_those_of_accelerate():
    loader = prepare(DataLoader(Numbers(10), batch_size=4), rank=0, world=2)
    assert [loader.end_of_dataloader for _ in loader] == [False, True]
    assert loader.remainder == 2


def test_an_empty_loader_is_refused():
    expect_refusal(UsageError, "0 samples", prepare, DataLoader(Numbers(0), batch_size=2))
    expect_refusal(
        UsageError, "3 samples, batch size 4", prepare, DataLoader(Numbers(3), batch_size=4, drop_last=True)
    )
    expect_refusal(
        UsageError, "3 full batches", prepare, DataLoader(Numbers(6), batch_size=2, drop_last=True), world=4
    )


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_fewer_samples_than_processes_are_repeated_and_counted_once(samples):
    ranks = [consume(prepare(DataLoader(Numbers(samples), batch_size=2), rank, 4)) for rank in range(4)]
    assert [[rows for rows, _, _ in batches] for batches in ranks] == [
        [[(2 * rank + i) % samples for i in range(2)]] for rank in range(4)
    ]
    [counts] = {counts for batches in ranks for _, counts, _ in batches}
    assert counts == BatchCounts((2, 2, 2, 2), tuple(min(max(samples - 2 * rank, 0), 2) for rank in range(4)))


def test_preparing_twice_is_refused():
    with pytest.raises(UsageError):
        prepare(prepare(DataLoader(Numbers(3))))


def test_a_distributed_sampler_is_refused_with_several_processes():
    sampler = DistributedSampler(Numbers(8), num_replicas=2, rank=0)
    expect_refusal(UsageError, "shuffle=True", prepare, DataLoader(Numbers(8), sampler=sampler), world=2)
    in_batches = DataLoader(Numbers(8), batch_sampler=BatchSampler(sampler, 2, False))
    expect_refusal(UsageError, "shuffle=True", prepare, in_batches, world=2)


def test_workers_out_of_order_are_refused_with_several_processes():
    loader = DataLoader(Numbers(8), batch_size=2, num_workers=2, in_order=False)
    expect_refusal(ConfigError, "in_order=True", prepare, loader, world=2)
    assert sorted(row for rows, _, _ in consume(prepare(loader)) for row in rows) == list(range(8))


def test_a_batch_size_that_cannot_be_split_is_refused():
    with pytest.raises(ConfigError):
        prepare(DataLoader(Numbers(20), batch_size=6), world=4, split_batches=True)
