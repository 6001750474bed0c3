"""Positions that do not fit, and what may differ from the saved run."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from lockstep.errors import CheckpointError, UsageError
from tests.data.helpers import Numbers, SizedStream, Stream, place_of, prepare, rows_of
from tests.refusals import expect_refusal


def rows_of_first(loader):
    return rows_of(next(iter(loader)))


def saved(loader, steps=1):
    running = iter(loader)
    for _ in range(steps):
        next(running)
    return loader.state_dict()


@pytest.mark.parametrize("make", [Numbers, SizedStream])
def test_a_dataset_of_another_length_is_refused(make):
    state = saved(prepare(DataLoader(make(40), batch_size=2)))
    other = prepare(DataLoader(make(41), batch_size=2))
    before = other.state_dict()
    with pytest.raises(CheckpointError, match="40 samples.* 41"):
        other.load_state_dict(state)
    assert place_of(other.state_dict()) == place_of(before)


def test_a_dataset_of_another_kind_is_refused():
    state = saved(prepare(DataLoader(SizedStream(8), batch_size=2)))
    with pytest.raises(CheckpointError, match="map-style"):
        prepare(DataLoader(Numbers(8), batch_size=2)).load_state_dict(state)


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (1, 2)])
def test_a_stream_needs_the_number_of_workers_it_was_saved_with(before, after):
    def make(workers):
        return prepare(DataLoader(Stream(20, striped=True), batch_size=2, num_workers=workers))

    state = saved(make(before))
    with pytest.raises(CheckpointError, match=f"num_workers={before}.*num_workers={after}"):
        make(after).load_state_dict(state)
    start = make(before).state_dict()
    make(after).load_state_dict(start)  # at an epoch's beginning any number will do


def test_map_style_data_may_change_the_number_of_workers():
    state = saved(prepare(DataLoader(Numbers(20), batch_size=2, num_workers=2)))
    other = prepare(DataLoader(Numbers(20), batch_size=2))
    other.load_state_dict(state)
    assert rows_of_first(other) == [2, 3]


class Batches:
    """A batch sampler with batches of one size."""

    def __init__(self, n, size):
        self.n, self.size = n, size

    def __iter__(self):
        return iter([list(range(i, min(i + self.size, self.n))) for i in range(0, self.n, self.size)])

    def __len__(self):
        return -(-self.n // self.size)


def test_a_batch_sampler_without_a_boundary_at_the_position_is_refused_when_reading_begins():
    state = saved(prepare(DataLoader(Numbers(30), batch_sampler=Batches(30, 4))), steps=3)
    fitting = prepare(DataLoader(Numbers(30), batch_sampler=Batches(30, 6)), world=2)
    fitting.load_state_dict(state)
    assert rows_of_first(fitting) == list(range(12, 18))
    other = prepare(DataLoader(Numbers(30), batch_sampler=Batches(30, 5)))
    other.load_state_dict(state)
    with pytest.raises(CheckpointError, match="10 samples.* 15"):
        next(iter(other))
    assert other.state_dict()["samples"] == [12]
    shorter = prepare(DataLoader(Numbers(30), batch_sampler=Batches(8, 4)))
    shorter.load_state_dict(state)
    expect_refusal(CheckpointError, "only 8", lambda: next(iter(shorter)))


def test_batches_out_of_order_have_no_position_in_the_middle_of_an_epoch():
    loader = prepare(DataLoader(Numbers(8), batch_size=2, num_workers=2, in_order=False))
    for number, _ in enumerate(loader):
        if number < 3:
            expect_refusal(UsageError, "in_order=True", loader.state_dict)
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("samples"), "lacks samples"),
        (lambda s: s.update(extra=1), "has the unknown extra"),
        (lambda s: s.update(epoch="1"), "'epoch' .* is '1'"),
        (lambda s: s.update(seed=True), "'seed' .* is True"),
        (lambda s: s.update(samples=[-1]), r"'samples' .* is \[-1\]"),
        (lambda s: s.update(rounds=2), "'rounds' .* is 2"),
        (lambda s: s.update(turn=3), "contradicts itself: .* turn 3"),
        (lambda s: s.update(samples=[1, 2]), "contradicts itself: 2 positions"),
        (lambda s: s.update(base=[9]), "contradicts itself: base"),
        (lambda s: s.update(kind="queue"), "contradicts itself: kind 'queue'"),
        (lambda s: s.update(world_size=0), "contradicts itself: .* 0 ranks"),
    ],
)
def test_a_state_that_is_none_is_refused_and_changes_nothing(change, message):
    loader = prepare(DataLoader(Numbers(8), batch_size=2))
    state = saved(prepare(DataLoader(Numbers(8), batch_size=2)))
    change(state)
    before = loader.state_dict()
    with pytest.raises(CheckpointError, match=message):
        loader.load_state_dict(state)
    assert place_of(loader.state_dict()) == place_of(before)
    assert len(list(loader)) == 4


def test_something_else_than_a_dict_is_refused():
    with pytest.raises(CheckpointError):
        prepare(DataLoader(Numbers(8), batch_size=2)).load_state_dict([])
