"""Groups are loaded in the background before they are used, within a budget."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable

import pytest
from torch import nn

from lockstep.errors import OffloadError, UsageError
from lockstep.offload.weights import Streamer, WeightGroup, least_budget
from tests.refusals import expect_refusal

TIMEOUT_S = 30.0


def make_groups(n: int, nbytes: int = 10) -> list[WeightGroup]:
    return [WeightGroup(f"block.{index}", [nn.Identity()], {}, nbytes) for index in range(n)]


class Recorder:
    """A mover that moves nothing, and notes what it is asked for."""

    def __init__(self) -> None:
        self.loaded: set[WeightGroup] = set()
        self.most = 0
        self.bound: list[WeightGroup] = []
        self.threads: set[int] = set()
        self.cannot_release: set[WeightGroup] = set()
        self.before_load: Callable[[WeightGroup], None] = lambda group: None
        self.is_closed = False

    def nbytes(self, group: WeightGroup) -> int:
        return group.nbytes

    def load(self, group: WeightGroup) -> None:
        self.threads.add(threading.get_ident())
        self.before_load(group)
        assert group not in self.loaded
        self.loaded.add(group)
        self.most = max(self.most, sum(one.nbytes for one in self.loaded))

    def bind(self, group: WeightGroup) -> None:
        assert group in self.loaded
        self.bound.append(group)

    def release(self, group: WeightGroup) -> bool:
        assert group in self.loaded
        if group in self.cannot_release:
            return False
        self.loaded.remove(group)
        return True

    def close(self) -> None:
        self.is_closed = True
        self.loaded.clear()


def run(streamer: Streamer, groups: list[WeightGroup], mover: Recorder, backward: bool = False) -> None:
    """A forward, and a backward, in which everything that can be loaded ahead is."""
    for group in groups:
        streamer.forward_begins(group)
        assert group in mover.loaded
        streamer.finish()
        assert group in mover.loaded
        streamer.forward_ended(group)
        streamer.finish()
    for group in reversed(groups) if backward else ():
        streamer.backward_begins(group)
        streamer.finish()
        assert group in mover.loaded


def test_forwards_within_a_budget_load_ahead_and_no_more_than_has_no_room() -> None:
    groups, mover = make_groups(10), Recorder()
    streamer = Streamer(groups, mover, budget=60, ahead=2)
    for _ in range(2):
        run(streamer, groups, mover)
    before = streamer.counters.loads
    for _ in range(9):
        run(streamer, groups, mover)
    # Of 6 places 2 are for loading ahead; Belady's optimum for the rest, 4, is 6 misses in 9 uses.
    assert streamer.counters.loads - before == 10 * (10 - 4)
    assert streamer.counters.bytes_loaded == 10 * streamer.counters.loads
    assert streamer.counters.urgent_loads == 1  # the very first
    assert streamer.counters.peak_bytes == mover.most == 60
    assert mover.bound == groups * 11
    assert mover.threads.isdisjoint({threading.get_ident()}) and len(mover.threads) == 1
    streamer.close()
    assert mover.is_closed


def test_training_keeps_what_is_used_next() -> None:
    groups, mover = make_groups(10), Recorder()
    streamer = Streamer(groups, mover, budget=60)
    run(streamer, groups, mover, backward=True)
    before = streamer.counters.loads
    for _ in range(3):
        run(streamer, groups, mover, backward=True)
    assert streamer.counters.loads - before == 3 * 2 * (10 - 6)
    assert streamer.counters.urgent_loads == 1
    assert mover.most == 60
    run(streamer, groups, mover)  # evaluation between
    run(streamer, groups[:3], mover)  # some of it alone
    run(streamer, groups, mover, backward=True)
    assert mover.most == 60
    streamer.close()


def test_any_use_finds_its_group_within_the_budget() -> None:
    """Whatever the order and the sizes."""
    rng = random.Random(0)
    for _ in range(30):
        sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, 8))]
        groups = [WeightGroup(str(i), [nn.Identity()], {}, size) for i, size in enumerate(sizes)]
        budget, mover = rng.randint(max(sizes), sum(sizes) + 1), Recorder()
        streamer = Streamer(groups, mover, budget=budget, ahead=rng.randrange(5))
        for group in rng.choices(groups, k=30):
            run(streamer, [group], mover, backward=rng.random() < 0.5)
        assert mover.most <= budget
        streamer.close()


def test_groups_around_others_stay_while_those_are_used() -> None:
    inner = make_groups(4)
    root = WeightGroup("", [nn.ModuleList([group.modules[0] for group in inner])], {}, 5)
    mover = Recorder()
    assert least_budget([root, *inner], mover.nbytes) == 15
    expect_refusal(OffloadError, "Give 15 bytes", Streamer, [root, *inner], mover, budget=14)
    streamer = Streamer([root, *inner], mover, budget=15)
    for _ in range(2):
        streamer.forward_begins(root)
        for group in inner:
            streamer.forward_begins(group)
            streamer.finish()
            assert mover.loaded == {root, group}
            streamer.forward_ended(group)
        streamer.forward_ended(root)
    streamer.close()


def test_an_interrupted_pass_holds_nothing_in_the_next_one() -> None:
    groups, mover = make_groups(2), Recorder()
    streamer = Streamer(groups, mover, budget=10)
    streamer.forward_begins(groups[0])  # KeyboardInterrupt: forward_ended is not called
    streamer.pass_begins()
    streamer.forward_begins(groups[1])
    assert mover.loaded == {groups[1]}
    streamer.close()


def test_what_cannot_be_let_go_stays_and_others_go() -> None:
    groups, mover = make_groups(6), Recorder()
    streamer = Streamer(groups, mover, budget=30, ahead=1)
    mover.cannot_release = {groups[0]}
    run(streamer, groups, mover)
    run(streamer, groups, mover)
    assert groups[0] in mover.loaded and mover.most == 30
    mover.cannot_release = set(groups)
    with pytest.raises(OffloadError, match=r"'block.0', 'block.\d', 'block.\d'"):
        run(streamer, groups, mover)
    streamer.close()


def test_loading_waits_until_a_group_is_ready() -> None:
    groups, mover = make_groups(3), Recorder()
    may_go, asked = threading.Event(), []

    def ready(group: WeightGroup) -> None:
        asked.append(group)
        if group is groups[1]:
            assert may_go.wait(TIMEOUT_S)

    streamer = Streamer(groups, mover, budget=30, ready=ready)
    streamer.forward_begins(groups[0])
    streamer.forward_ended(groups[0])
    assert groups[1] not in mover.loaded
    threading.Timer(0.05, may_go.set).start()
    streamer.forward_begins(groups[1])
    assert may_go.is_set() and groups[1] in mover.loaded
    streamer.finish()
    assert asked == groups and streamer.counters.waited_s > 0
    streamer.close()


def test_an_error_of_the_background_is_raised_where_its_group_is_used() -> None:
    groups, mover = make_groups(3), Recorder()

    def fail(group: WeightGroup) -> None:
        if group is groups[1]:
            raise OffloadError("disk failed")

    mover.before_load = fail
    streamer = Streamer(groups, mover, budget=30)
    streamer.forward_begins(groups[0])
    streamer.forward_begins(groups[2])
    for _ in range(2):  # each time it is tried again
        with pytest.raises(OffloadError):
            streamer.forward_begins(groups[1])
        streamer.forward_ended(groups[1])
    streamer.forward_begins(groups[0])
    with pytest.raises(OffloadError):
        streamer.finish()
    mover.before_load = lambda group: None
    run(streamer, groups, mover)  # it goes on when the disk does
    streamer.close()


def test_two_threads_may_use_groups_at_the_same_time() -> None:
    groups, mover = make_groups(8), Recorder()
    streamer = Streamer(groups, mover, budget=40)
    failures: list[BaseException] = []

    def forwards() -> None:
        try:
            for group in groups * 30:
                streamer.forward_begins(group)
                assert group in mover.loaded
                streamer.forward_ended(group)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=forwards) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not failures and mover.most <= 40
    streamer.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_process_reads_weights_in_place_and_refuses_to_wait_for_others() -> None:
    groups = make_groups(2)
    for in_place in (True, False):
        streamer = Streamer(groups, Recorder(), budget=20, in_place=in_place)
        child = os.fork()
        if not child:
            outcome = 1
            try:
                streamer.forward_begins(groups[0])
                outcome = 0
            except UsageError:
                outcome = 2
            finally:
                os._exit(outcome)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == (0 if in_place else 2)
        streamer.close()
