"""Prepared loaders over iterable datasets that every rank reads for itself."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lockstep.errors import ConfigError
from lockstep.runtime import BatchCounts
from tests.data.helpers import SizedStream, Stream, chunks, consume, prepare, real_rows_per_step, rows_of


@pytest.mark.parametrize(
    ("world", "split", "workers"), [(1, False, 1), (2, True, 0), (2, False, 1), (4, False, 0), (4, True, 0)]
)
def test_each_step_is_the_next_global_batch_of_the_stream(world, split, workers):
    def make():
        return DataLoader(Stream(22), batch_size=8 if split else 8 // world, num_workers=workers)

    assert real_rows_per_step(make, world, split_batches=split) == chunks(list(range(22)), 8)


@pytest.mark.parametrize("split", [False, True])
def test_striped_workers_give_every_sample_once_with_exact_counts(split):
    def make(world=2):
        return DataLoader(Stream(23, striped=True), batch_size=4 if split else 4 // world, num_workers=2)

    steps = real_rows_per_step(make, 2, split_batches=split)
    assert sorted(row for rows in steps for row in rows) == list(range(23))
    # Torch's own loader over the same stripes, with the global batch size.
    plain = DataLoader(Stream(23, striped=True), batch_size=4, num_workers=2)
    assert steps == [batch.tolist() for batch in plain]


def test_the_last_round_is_completed_from_the_beginning():
    batches = consume(prepare(DataLoader(Stream(5), batch_size=2), rank=1, world=2))
    assert batches[-1] == ([1, 2], BatchCounts((2, 2), (1, 0)), True)


def test_ranks_have_equally_many_batches_of_a_stream_whatever_is_asked():
    first, second = (
        consume(prepare(DataLoader(Stream(5), batch_size=2), rank, 2, even_batches=False))
        for rank in range(2)
    )
    assert first[-1] == ([4, 0], BatchCounts((2, 2), (1, 0)), True)
    assert second[-1] == ([1, 2], BatchCounts((2, 2), (1, 0)), True)


def test_drop_last_drops_the_incomplete_round():
    def make():
        return DataLoader(Stream(11), batch_size=2, drop_last=True)

    assert real_rows_per_step(make, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_length_is_per_rank_where_the_dataset_has_one():
    assert len(prepare(DataLoader(SizedStream(10), batch_size=2), world=2)) == 3
    with pytest.raises(TypeError):
        len(prepare(DataLoader(Stream(10), batch_size=2), world=2))


class Batches(IterableDataset):
    """Makes batches itself, of varying size."""

    def __iter__(self):
        return iter([torch.arange(4), torch.arange(3), torch.arange(2)])


def test_ready_made_batches_are_dealt_whole_and_counted():
    batches = consume(prepare(DataLoader(Batches(), batch_size=None), rank=1, world=2))
    assert batches == [
        ([0, 1, 2], BatchCounts((4, 3), (4, 3)), False),
        ([0, 1, 2, 3], BatchCounts((2, 4), (2, 0)), True),
    ]
    with pytest.raises(ConfigError, match="Use split_batches=False"):
        prepare(DataLoader(Batches(), batch_size=None), world=2, split_batches=True)


def shift_by_worker(worker_id):
    get_worker_info().dataset.first = 100 * worker_id


def test_worker_init_fn_reaches_the_users_dataset():
    loader = DataLoader(Stream(4), batch_size=2, num_workers=2, worker_init_fn=shift_by_worker)
    batches = [rows for rows, _, _ in consume(prepare(loader, rank=1, world=2))]
    assert batches == [[2, 3], [102, 103]]


def test_a_generator_of_the_dataset_is_seeded_by_epoch():
    class Random(IterableDataset):
        def __init__(self):
            self.generator = torch.Generator()

        def __iter__(self):
            return iter(torch.randperm(8, generator=self.generator).tolist())

    first, second = (prepare(DataLoader(Random(), batch_size=2), rank, 2, data_seed=4) for rank in range(2))
    for epoch in range(2):
        expected = torch.randperm(8, generator=torch.Generator().manual_seed(4 + epoch)).tolist()
        ours = [rows_of(a) + rows_of(b) for a, b in zip(first, second, strict=True)]
        assert ours == chunks(expected, 4)


@pytest.mark.filterwarnings("ignore")
def test_a_data_pipe_is_shuffled_by_epoch_and_shared_by_its_workers():
    from torch.utils.data.datapipes.iter import IterableWrapper

    def epochs():
        pipe = IterableWrapper(range(20)).shuffle().sharding_filter()
        loader = prepare(DataLoader(pipe, batch_size=2, num_workers=2), data_seed=1)
        return [[row for batch in loader for row in rows_of(batch)] for _ in range(2)]

    first, second = epochs()
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert epochs() == [first, second]
