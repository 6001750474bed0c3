"""What a position counts: before, inside, after and between loops, nested, broken off, with copies that skip."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from lockstep import skip_first_batches
from tests.data.helpers import Numbers, Stream, place_of, prepare, rows_of, shuffled


def first_rows(loader):
    return rows_of(next(iter(loader)))


@pytest.mark.parametrize("data", [Numbers(8), Stream(8)])
def test_before_after_and_between_epochs_the_position_is_the_beginning_of_the_next_one(data):
    loader = prepare(DataLoader(data, batch_size=2))
    assert (loader.state_dict()["epoch"], loader.state_dict()["samples"]) == (0, [0])
    for _ in loader:
        state = loader.state_dict()
    # Inside of the loop too: its last batch is behind it.
    assert (state["epoch"], state["samples"]) == (1, [0])
    assert place_of(loader.state_dict()) == place_of(state)
    loader.set_epoch(7)
    assert place_of(loader.state_dict()) == {**place_of(state), "epoch": 7}
    loader.load_state_dict(state)
    assert loader.epoch == 1
    assert len(list(loader)) == 4


def test_a_loop_that_was_broken_off_keeps_its_position_until_the_next_one():
    def make():
        return prepare(DataLoader(Numbers(8), batch_size=2, shuffle=True), data_seed=0)

    loader = make()
    for number, _ in enumerate(loader):
        if number == 1:
            break
    state = loader.state_dict()
    assert (state["epoch"], state["samples"]) == (0, [4])
    other = make()
    other.load_state_dict(state)
    assert [row for batch in other for row in rows_of(batch)] == shuffled(8, 0)[4:]
    # In the process itself the next loop is the next epoch, whole.
    assert [row for batch in loader for row in rows_of(batch)] == shuffled(8, 1)
    for _ in loader:
        break
    loader.set_epoch(loader.epoch)  # the broken off epoch counts as done
    assert (loader.state_dict()["epoch"], loader.state_dict()["samples"]) == (3, [0])


def test_a_loop_that_failed_keeps_its_position_too():
    loader = prepare(DataLoader(Numbers(8), batch_size=2))
    with pytest.raises(ZeroDivisionError):
        [1 // (rows_of(batch)[0] - 4) for batch in loader]
    assert loader.state_dict()["samples"] == [6]


def test_loaders_in_nested_loops_have_a_position_each():
    outer = prepare(DataLoader(Numbers(8), batch_size=2))
    inner = prepare(DataLoader(Numbers(6), batch_size=2))
    positions = []
    for _ in outer:
        for _ in inner:
            positions.append((outer.state_dict(), inner.state_dict()))
    assert [(o["epoch"], *o["samples"], i["epoch"], *i["samples"]) for o, i in positions[:5]] == [
        (0, 2, 0, 2),
        (0, 2, 0, 4),
        (0, 2, 1, 0),
        (0, 4, 1, 2),
        (0, 4, 1, 4),
    ]


def test_a_copy_that_skips_and_its_loader_have_one_position_in_the_whole_epoch():
    def make():
        return prepare(DataLoader(Numbers(12), batch_size=2, shuffle=True), data_seed=0)

    loader = make()
    copy = skip_first_batches(loader, 2)
    assert copy.state_dict()["samples"] == [0]  # nothing received yet
    for _ in copy:
        break
    state = loader.state_dict()
    assert (state["epoch"], state["samples"]) == (0, [6])
    assert place_of(copy.state_dict()) == place_of(state)
    for restore in (lambda: make(), lambda: skip_first_batches(make(), 2)):
        other = restore()
        other.load_state_dict(state)
        assert [row for batch in other for row in rows_of(batch)] == shuffled(12, 0)[6:]
    # Scripts that both load a position and skip what is behind it do not skip twice.
    other = make()
    other.load_state_dict(state)
    assert [row for batch in skip_first_batches(other, 3) for row in rows_of(batch)] == shuffled(12, 0)[6:]
    assert [row for batch in other for row in rows_of(batch)] == shuffled(12, 1)


@pytest.mark.parametrize("world", [1, 3])
def test_what_is_behind_a_position_is_never_read_of_map_style_data(world):
    first = prepare(DataLoader(Numbers(1000), batch_size=10), world=2)
    running = iter(first)
    for _ in range(40):
        next(running)
    data = Numbers(1000)
    other = prepare(DataLoader(data, batch_size=10), world=world)
    other.load_state_dict(first.state_dict())
    assert first_rows(other) == list(range(800, 810))
    assert data.asked == list(range(800, 810))
