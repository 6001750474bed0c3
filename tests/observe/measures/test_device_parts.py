"""Parts on a device, with events whose times are known: the device is behind the host."""

from __future__ import annotations

import pytest
import torch

from lockstep.observe.measures import EVERY, DeviceParts, device_parts_of
from lockstep.runtime import Parts


class Device:
    """Passes an event at the time that it is told, in milliseconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.arrived = True
        self.made = 0

    def event(self) -> Event:
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at: float | None = None

    def record(self) -> None:
        self.at = self.device.now

    def query(self) -> bool:
        return self.device.arrived

    def elapsed_time(self, other: Event) -> float:
        assert self.device.arrived and self.at is not None and other.at is not None
        return other.at - self.at


def make_step(parts: Parts, device: Device) -> None:
    """2 ms of forward, 3 of backward, 2 and 1 again for another micro-batch, 5 of the optimizer, 1 of nothing."""
    for part, takes in (("forward", 2), ("backward", 3), ("forward", 2), ("backward", 1), ("optimizer", 5)):
        parts.enter(part)
        parts.enter(part)  # the same again
        device.now += takes
    parts.enter("other")
    device.now += 1


def test_one_step_in_many_is_measured_and_nobody_waits_for_it() -> None:
    device, parts = Device(), Parts()
    on_device = DeviceParts(parts, device.event)
    found = []
    for step in range(2 * EVERY + 4):
        make_step(parts, device)
        device.arrived = step % EVERY != 2  # the events of a step that was measured come a step late
        found.append(on_device.step_ends())
    expected = {"forward": 4e-3, "backward": 4e-3, "optimizer": 5e-3, "other": pytest.approx(1e-3)}
    known = {step: one for step, one in enumerate(found) if one is not None}
    assert list(known) == [3, EVERY + 3, 2 * EVERY + 3]
    assert all(one == {**expected, "total": pytest.approx(14e-3)} for one in known.values())
    assert device.made == 3 * 8  # of the part that it was in, of six that began, and of the end


def test_a_cpu_has_none() -> None:
    assert device_parts_of(torch.device("cpu"), Parts()) is None
