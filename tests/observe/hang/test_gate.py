"""All ranks stop at the same step boundary, whenever they hear of it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.observe.hang import StopGate
from lockstep.runtime import StepClock
from tests.marks import examples


class Stopped(Exception):
    """What the gate's ``stop`` raises here."""


def stop(cause: str) -> None:
    raise Stopped(cause)


def step(clock: StepClock) -> None:
    """One step of a training loop, as loader, accelerator and optimizer see it."""
    clock.batch_wanted()
    clock.backward_begins()
    clock.stepped()


def test_the_time_before_backward_is_counted_for_each_micro_batch(monkeypatch) -> None:
    times = iter([0.0, 1.0, 3.0, 10.0, 11.0, 13.0, 14.0, 20.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = StepClock()
    clock.boundary()  # reads 0
    clock.backward_begins()  # 1: one second of its own
    clock.batch_wanted()  # 3
    clock.backward_begins()  # 10: seven more
    clock.stepped()
    clock.batch_wanted()  # 11: the boundary
    assert list(clock.durations_s) == [11.0]
    assert list(clock.local_s) == [8.0]


@pytest.mark.parametrize("name", ["at_step", "at_batch"])
def test_whoever_looks_on_is_told_also_when_another_leaves_at_that_moment(name: str) -> None:
    clock = StepClock()
    called = []

    def leaves(*_: object) -> None:
        getattr(clock, name).remove(leaves)

    getattr(clock, name).extend([leaves, lambda *_: called.append(name)])
    clock.batch_comes(None)
    clock.boundary()
    assert called == [name]


def test_nobody_answers_so_training_goes_on() -> None:
    clock = StepClock()
    gate = StopGate(clock, stop, limit_s=0.05)
    gate.close("SIGTERM")
    for _ in range(3):
        step(clock)
    assert clock.boundaries == 2


class Barrier(threading.Barrier):
    """The all-reduce of a step: nobody leaves before all came."""


def rank(clock: StepClock, barrier: Callable[[], object], steps: int, stopped_at: list[int]) -> None:
    try:
        for _ in range(steps):
            clock.batch_wanted()
            clock.backward_begins()
            barrier()
            clock.stepped()
    except Stopped:
        stopped_at.append(clock.boundaries)


@examples(30)
@given(world_size=st.integers(2, 5), seed=st.integers(0, 10**6))
def test_ranks_that_wait_for_each_other_stop_at_one_boundary(world_size: int, seed: int) -> None:
    """The requests reach the ranks one by one, at random moments of their training."""
    order = random.Random(seed)
    barrier = Barrier(world_size)
    clocks = [StepClock() for _ in range(world_size)]
    gates = [StopGate(clock, stop) for clock in clocks]
    stopped_at: list[int] = []
    threads = [
        threading.Thread(target=rank, args=(clock, lambda: barrier.wait(10), 10**7, stopped_at))
        for clock in clocks
    ]
    for thread in threads:
        thread.start()
    while clocks[0].boundaries < 3:
        pass
    passed = []
    for index in order.sample(range(world_size), world_size):
        passed.append(gates[index].close("SIGUSR1"))
        threading.Event().wait(order.random() * 0.003)
    for index in order.sample(range(world_size), world_size):
        gates[index].aim(1 + max(passed))
        threading.Event().wait(order.random() * 0.003)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert stopped_at == [1 + max(passed)] * world_size
