"""Units are loaded in the background before they are used, within a budget."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable

import pytest
from torch import nn

from lockstep.errors import OffloadError, UsageError
from lockstep.offload.weights import Streamer, WeightGroup, least_budget
from tests.refusals import expect_refusal

TIMEOUT_S = 30.0


def make_units(n: int, nbytes: int = 10) -> list[WeightGroup]:
    return [WeightGroup(f"block.{index}", [nn.Identity()], {}, nbytes) for index in range(n)]


class Recorder:
    """A mover that moves nothing, and notes what it is asked for."""

    def __init__(self) -> None:
        self.loaded: set[WeightGroup] = set()
        self.most = 0
        self.bound: list[WeightGroup] = []
        self.threads: set[int] = set()
        self.cannot_release: set[WeightGroup] = set()
        self.before_load: Callable[[WeightGroup], None] = lambda unit: None
        self.is_closed = False

    def nbytes(self, unit: WeightGroup) -> int:
        return unit.nbytes

    def load(self, unit: WeightGroup) -> None:
        self.threads.add(threading.get_ident())
        self.before_load(unit)
        assert unit not in self.loaded
        self.loaded.add(unit)
        self.most = max(self.most, sum(one.nbytes for one in self.loaded))

    def bind(self, unit: WeightGroup) -> None:
        assert unit in self.loaded
        self.bound.append(unit)

    def release(self, unit: WeightGroup) -> bool:
        assert unit in self.loaded
        if unit in self.cannot_release:
            return False
        self.loaded.remove(unit)
        return True

    def close(self) -> None:
        self.is_closed = True
        self.loaded.clear()


def run(streamer: Streamer, units: list[WeightGroup], mover: Recorder, backward: bool = False) -> None:
    """A forward, and a backward, in which everything that can be loaded ahead is."""
    for unit in units:
        streamer.forward_begins(unit)
        assert unit in mover.loaded
        streamer.finish()
        assert unit in mover.loaded
        streamer.forward_ended(unit)
        streamer.finish()
    for unit in reversed(units) if backward else ():
        streamer.backward_begins(unit)
        streamer.finish()
        assert unit in mover.loaded


def test_forwards_within_a_budget_load_ahead_and_no_more_than_has_no_room() -> None:
    units, mover = make_units(10), Recorder()
    streamer = Streamer(units, mover, budget=60, ahead=2)
    for _ in range(2):
        run(streamer, units, mover)
    before = streamer.counters.loads
    for _ in range(9):
        run(streamer, units, mover)
    # Of 6 places 2 are for loading ahead; Belady's optimum for the rest, 4, is 6 misses in 9 uses.
    assert streamer.counters.loads - before == 10 * (10 - 4)
    assert streamer.counters.bytes_loaded == 10 * streamer.counters.loads
    assert streamer.counters.urgent_loads == 1  # the very first
    assert streamer.counters.peak_bytes == mover.most == 60
    assert mover.bound == units * 11
    assert mover.threads.isdisjoint({threading.get_ident()}) and len(mover.threads) == 1
    streamer.close()
    assert mover.is_closed


def test_training_keeps_what_is_used_next() -> None:
    units, mover = make_units(10), Recorder()
    streamer = Streamer(units, mover, budget=60)
    run(streamer, units, mover, backward=True)
    before = streamer.counters.loads
    for _ in range(3):
        run(streamer, units, mover, backward=True)
    assert streamer.counters.loads - before == 3 * 2 * (10 - 6)
    assert streamer.counters.urgent_loads == 1
    assert mover.most == 60
    run(streamer, units, mover)  # evaluation between
    run(streamer, units[:3], mover)  # some of it alone
    run(streamer, units, mover, backward=True)
    assert mover.most == 60
    streamer.close()


def test_units_around_others_stay_while_those_are_used() -> None:
    inner = make_units(4)
    root = WeightGroup("", [nn.ModuleList([unit.modules[0] for unit in inner])], {}, 5)
    mover = Recorder()
    assert least_budget([root, *inner], mover.nbytes) == 15
    expect_refusal(OffloadError, "Give 15 bytes", Streamer, [root, *inner], mover, budget=14)
    streamer = Streamer([root, *inner], mover, budget=15)
    for _ in range(2):
        streamer.forward_begins(root)
        for unit in inner:
            streamer.forward_begins(unit)
            streamer.finish()
            assert mover.loaded == {root, unit}
            streamer.forward_ended(unit)
        streamer.forward_ended(root)
    streamer.close()


def test_a_unit_that_begins_again_while_it_is_in_use_stays_until_both_have_ended() -> None:
    units, mover = make_units(2), Recorder()
    streamer = Streamer(units, mover, budget=10)
    streamer.forward_begins(units[0])
    streamer.forward_begins(units[0])
    streamer.forward_ended(units[0])
    expect_refusal(OffloadError, "'block.1'", streamer.forward_begins, units[1])
    streamer.forward_ended(units[1])
    streamer.forward_ended(units[0])
    streamer.forward_begins(units[1])
    assert mover.loaded == {units[1]}
    streamer.close()


def test_an_interrupted_pass_holds_nothing_in_the_next_one() -> None:
    units, mover = make_units(2), Recorder()
    streamer = Streamer(units, mover, budget=10)
    streamer.forward_begins(units[0])  # KeyboardInterrupt: forward_ended is not called
    streamer.pass_begins()
    streamer.forward_begins(units[1])
    assert mover.loaded == {units[1]}
    streamer.close()


def test_what_cannot_be_let_go_stays_and_others_go() -> None:
    units, mover = make_units(6), Recorder()
    streamer = Streamer(units, mover, budget=30, ahead=1)
    mover.cannot_release = {units[0]}
    run(streamer, units, mover)
    run(streamer, units, mover)
    assert units[0] in mover.loaded and mover.most == 30
    mover.cannot_release = set(units)
    with pytest.raises(OffloadError, match=r"'block.0', 'block.\d', 'block.\d'"):
        run(streamer, units, mover)
    streamer.close()


def test_loading_waits_until_a_unit_is_ready() -> None:
    units, mover = make_units(3), Recorder()
    may_go, asked = threading.Event(), []

    def ready(unit: WeightGroup) -> None:
        asked.append(unit)
        if unit is units[1]:
            assert may_go.wait(TIMEOUT_S)

    streamer = Streamer(units, mover, budget=30, ready=ready)
    streamer.forward_begins(units[0])
    streamer.forward_ended(units[0])
    assert units[1] not in mover.loaded
    threading.Timer(0.05, may_go.set).start()
    streamer.forward_begins(units[1])
    assert may_go.is_set() and units[1] in mover.loaded
    streamer.finish()
    assert asked == units and streamer.counters.waited_s > 0
    streamer.close()


def test_an_error_of_the_background_is_raised_where_its_unit_is_used() -> None:
    units, mover = make_units(3), Recorder()

    def fail(unit: WeightGroup) -> None:
        if unit is units[1]:
            raise OffloadError("disk failed")

    mover.before_load = fail
    streamer = Streamer(units, mover, budget=30)
    streamer.forward_begins(units[0])
    streamer.forward_begins(units[2])
    for _ in range(2):  # each time it is tried again
        with pytest.raises(OffloadError):
            streamer.forward_begins(units[1])
        streamer.forward_ended(units[1])
    streamer.forward_begins(units[0])
    with pytest.raises(OffloadError):
        streamer.finish()
    mover.before_load = lambda unit: None
    run(streamer, units, mover)  # it goes on when the disk does
    streamer.close()


def test_two_threads_may_use_units_at_the_same_time() -> None:
    units, mover = make_units(8), Recorder()
    streamer = Streamer(units, mover, budget=40)
    failures: list[BaseException] = []

    def forwards() -> None:
        try:
            for unit in units * 30:
                streamer.forward_begins(unit)
                assert unit in mover.loaded
                streamer.forward_ended(unit)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=forwards) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not failures and mover.most <= 40
    streamer.close()


def test_the_thread_ends_with_its_streamer() -> None:
    units, mover = make_units(3), Recorder()
    streamer = Streamer(units, mover, budget=30)
    run(streamer, units, mover)
    (ident,) = mover.threads
    (thread,) = [thread for thread in threading.enumerate() if thread.ident == ident]
    gone = weakref.ref(streamer)
    del streamer
    gc.collect()
    thread.join(TIMEOUT_S)
    assert gone() is None and not thread.is_alive() and thread.daemon


def test_after_close_nothing_is_loaded_or_waited_for() -> None:
    units, mover = make_units(3), Recorder()
    streamer = Streamer(units, mover, budget=30)
    run(streamer, units, mover)
    streamer.close()
    streamer.close()
    streamer.forward_begins(units[0])
    streamer.forward_ended(units[0])
    streamer.finish()
    assert not mover.loaded


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_process_reads_weights_in_place_and_refuses_to_wait_for_others() -> None:
    units = make_units(2)
    for in_place in (True, False):
        streamer = Streamer(units, Recorder(), budget=20, in_place=in_place)
        child = os.fork()
        if not child:
            outcome = 1
            try:
                streamer.forward_begins(units[0])
                outcome = 0
            except UsageError:
                outcome = 2
            finally:
                os._exit(outcome)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == (0 if in_place else 2)
        streamer.close()
