"""What a side stream is asked for, told by a device module that only takes notes."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.offload import Copies, SideStream, beside_accelerator, copies_of


def noting_module(notes: list[Any]) -> SimpleNamespace:
    class Stream:
        def __init__(self, device: Any = None, name: str = "side") -> None:
            self.name = name

        def wait_event(self, event: Any) -> None:
            notes.append((self.name, "waits", event.of))

    class Event:
        of = ""

        def record(self, stream: Stream) -> None:
            self.of = stream.name
            notes.append(("event of", stream.name))

        def query(self) -> int:
            return 1

        def synchronize(self) -> None:
            notes.append(("host waits", self.of))

    @contextmanager
    def stream(current: Stream) -> Any:
        notes.append(("in", current.name))
        yield

    streams = iter([Stream(name="first"), Stream(name="second")])
    return SimpleNamespace(
        Stream=Stream, Event=Event, stream=stream, current_stream=lambda device: next(streams)
    )


def test_copies_run_on_the_side_and_memory_is_that_of_the_stream_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes: list[Any] = []
    module = noting_module(notes)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    copies = SideStream(torch.device("cpu"))
    copies.follow()  # another stream computes now
    copies.after(copies.computed())
    target = copies.device_bytes(8)
    copies.copy(target, torch.full((8,), 7, dtype=torch.uint8))
    copied = copies.copied()
    copies.compute_after(copied)
    assert copies.is_done(copied) is True
    copies.wait(copied)
    assert notes == [
        *(("event of", "second"), ("side", "waits", "second"), ("in", "second"), ("in", "side")),
        *(("event of", "side"), ("second", "waits", "side"), ("host waits", "side")),
    ]  # fmt: skip
    assert target.tolist() == [7] * 8 and not copies.reads(target)


def test_devices_without_streams_copy_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(copies_of(torch.device("cpu"))) is Copies
    assert (
        beside_accelerator(torch.device("cpu")) is None and beside_accelerator(torch.device("meta")) is None
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    assert type(copies_of(torch.device("mps"))) is Copies
