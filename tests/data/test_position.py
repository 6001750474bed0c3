"""Continuing in the middle of an epoch: skipped batches and saved positions."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep import skip_first_batches
from lockstep.errors import ConfigError, UsageError
from tests.data.helpers import Numbers, SizedStream, Stream, consume, prepare, rows_of, shuffled
from tests.refusals import expect_refusal


@pytest.mark.parametrize(
    ("skipped", "split", "drop_last"), [(0, False, False), (1, True, False), (2, False, True)]
)
def test_skipping_gives_the_rest_of_the_epoch_with_its_counts(skipped, split, drop_last):
    def make():
        loader = DataLoader(Numbers(22), batch_size=4, shuffle=True, drop_last=drop_last)
        return prepare(loader, rank=1, world=2, split_batches=split, data_seed=2)

    whole = make()
    loader = skip_first_batches(make(), skipped)
    assert len(loader) == len(whole) - skipped
    assert consume(loader) == consume(whole)[skipped:]


def test_skipped_batches_of_map_style_data_are_never_read():
    data = Numbers(100)
    loader = skip_first_batches(prepare(DataLoader(data, batch_size=10), rank=1, world=2), 3)
    assert [rows_of(batch) for batch in loader] == [list(range(70, 80)), list(range(90, 100))]
    assert data.asked == [*range(70, 80), *range(90, 100)]
    data.asked.clear()
    assert len(list(skip_first_batches(DataLoader(data, batch_size=10), 9))) == 1
    assert data.asked == list(range(90, 100))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_an_iterable_dataset_are_skipped_with_workers_too(workers):
    def make():
        return prepare(
            DataLoader(Stream(20, striped=True), batch_size=2, num_workers=workers), rank=1, world=2
        )

    assert consume(skip_first_batches(make(), 2)) == consume(make())[2:]


def test_skipping_all_batches_gives_none_and_more_is_an_error():
    loader = prepare(DataLoader(Numbers(8), batch_size=2), world=2)
    empty = skip_first_batches(loader, 2)
    assert len(empty) == 0
    assert list(empty) == []
    expect_refusal(UsageError, "3 batches", skip_first_batches, loader, 3)
    expect_refusal(ConfigError, "-1", skip_first_batches, loader, -1)
    expect_refusal(UsageError, "5 batches", skip_first_batches, DataLoader(Numbers(8), batch_size=2), 5)


def test_epochs_go_on_behind_a_skipped_beginning():
    loader = prepare(DataLoader(Numbers(8), batch_size=4, shuffle=True), data_seed=0)
    loader.set_epoch(3)
    assert [rows_of(batch) for batch in skip_first_batches(loader, 1)] == [shuffled(8, 3)[4:]]
    assert [row for batch in loader for row in rows_of(batch)] == shuffled(8, 4)


@pytest.mark.parametrize("data", [Numbers(9), Stream(9)])
def test_a_plain_loader_can_skip_too(data):
    loader = DataLoader(data, batch_size=2, collate_fn=tuple, drop_last=True)
    skipping = skip_first_batches(loader, 1)
    assert [list(skipping) for _ in range(2)] == [[(2, 3), (4, 5), (6, 7)]] * 2
    if isinstance(data, Numbers):
        assert len(skipping) == 3


def test_a_plain_loader_without_automatic_batching_can_skip_too():
    assert list(skip_first_batches(DataLoader([1, 2, 3], batch_size=None), 2)) == [3]
    assert len(skip_first_batches(DataLoader(SizedStream(6), batch_size=2), 2)) == 1


def test_a_position_survives_torch_save(tmp_path):
    loader = prepare(DataLoader(Numbers(8), batch_size=2))
    next(iter(loader))
    torch.save(loader.state_dict(), tmp_path / "loader")
    other = prepare(DataLoader(Numbers(8), batch_size=2))
    other.load_state_dict(torch.load(tmp_path / "loader"))
    assert [rows_of(batch) for batch in other] == [[2, 3], [4, 5], [6, 7]]


def test_choosing_another_epoch_leaves_a_loaded_position():
    loader = prepare(DataLoader(Numbers(8), batch_size=4, shuffle=True), data_seed=0)
    next(iter(loader))
    state = loader.state_dict()
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert [rows_of(batch) for batch in loader] == [shuffled(8, 0)[4:]]
    loader.load_state_dict(state)
    loader.set_epoch(2)
    assert [row for batch in loader for row in rows_of(batch)] == shuffled(8, 2)


def test_loading_a_saved_position_into_a_copy_that_skips_is_not_added_up():
    loader = prepare(DataLoader(Numbers(8), batch_size=2))
    skipping = skip_first_batches(loader, 1)
    next(iter(skipping))
    state = skipping.state_dict()
    assert state["samples"] == [4]
    skipping.load_state_dict(state)
    assert [rows_of(batch) for batch in skipping] == [[4, 5], [6, 7]]
