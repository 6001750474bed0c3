"""Which copies go through pinned memory, and how: with stand-ins for pinned memory and for the CUDA device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from lockstep import Accelerator, DataLoaderConfiguration
from lockstep.comm import mover
from lockstep.data import PinnedCopies, batch_mover, prepare_loader
from lockstep.errors import ConfigError
from lockstep.runtime import StepState
from tests.data.helpers import ALONE, Numbers, Stream
from tests.patching import module_of

DEVICE = torch.device("meta")


class PinnedMemory(TorchFunctionMode):
    """Ordinary memory in place of pinned memory; remembers what was pinned, and how each tensor was moved."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[torch.Tensor] = []
        self.moves: list[tuple[torch.Tensor, bool]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.is_pinned:
            return any(args[0] is one for one in self.pinned)
        if func is torch.Tensor.to:
            self.moves.append((args[0], kwargs["non_blocking"]))
        if kwargs.pop("pin_memory", False):
            self.pinned.append(func(*args, **kwargs))
            return self.pinned[-1]
        return func(*args, **kwargs)


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


class Own:
    """A batch with a method ``to`` of its own, which takes no ``non_blocking``."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Own:
        return Own(self.x.to(device, non_blocking=False))


def test_tensors_are_copied_into_pinned_memory_and_from_there_without_waiting() -> None:
    first, second = torch.arange(6.0).view(2, 3), torch.arange(4).view(2, 2).t()
    for batch in ([first, second], {"a": first, "b": [second]}, (first, Pair(second, "name"))):
        with PinnedMemory() as memory:
            moved = mover(DEVICE, False, PinnedCopies(DEVICE, False, rank=0))(batch)
        assert type(moved) is type(batch)
        assert [one.tolist() for one in memory.pinned] == [first.tolist(), second.tolist()]
        assert [one.stride() for one in memory.pinned] == [first.stride(), second.stride()]
        for (moving, waits_not), pinned in zip(memory.moves, memory.pinned, strict=True):
            assert moving is pinned
            assert waits_not
    assert moved[1].x.device == DEVICE
    assert moved[1].x.stride() == second.stride()
    assert moved[1].name == "name"


def others() -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "pinned already", lambda: torch.ones(2)
    yield "on the device", lambda: torch.ones(2, device=DEVICE)
    yield "a parameter", lambda: torch.nn.Parameter(torch.ones(2))
    yield "has a gradient", lambda: torch.ones(2, requires_grad=True)
    yield "sparse", lambda: torch.eye(2).to_sparse()
    yield "conjugated", lambda: torch.ones(2, dtype=torch.complex64).conj()


@pytest.mark.parametrize(
    ("name", "make"), list(others()), ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("non_blocking", [True, False])
def test_other_tensors_are_moved_as_torch_does(
    name: str, make: Callable[[], Any], non_blocking: bool
) -> None:
    tensor = make()
    copies = PinnedCopies(DEVICE, non_blocking, rank=0)
    memory = PinnedMemory()
    if name == "pinned already":
        memory.pinned.append(tensor)
    with memory:
        copies(tensor)
    assert len(memory.pinned) == (name == "pinned already")
    [(moving, waits_not)] = memory.moves
    assert moving is tensor
    assert waits_not == non_blocking


def test_objects_with_a_method_to_move_themselves() -> None:
    move = batch_mover(DEVICE, False, pins=True, rank=0)
    assert move(Own(torch.ones(2))).x.device == DEVICE
    own, text = move([Own(torch.ones(2)), "text"])
    assert (own.x.device, text) == (DEVICE, "text")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here memory can be pinned")
def test_without_pinned_memory_batches_are_copied_as_before(caplog: pytest.LogCaptureFixture) -> None:
    """Here torch raises a real error: there is no device to pin memory for."""
    copies = PinnedCopies(DEVICE, False, rank=0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert copies(torch.ones(3)).device == DEVICE
    [record] = caplog.records
    assert "12 bytes" in record.getMessage()
    assert "pin_memory=False" in record.getMessage()
    caplog.clear()
    PinnedCopies(DEVICE, False, rank=1)(torch.ones(3))
    assert not caplog.records  # one rank says it


@pytest.mark.parametrize(
    ("device", "pins", "through_pinned_memory"),
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, False), ("meta", True, False)],
)
def test_only_batches_for_cuda_devices_are_pinned(
    device: str, pins: bool, through_pinned_memory: bool
) -> None:
    move: Any = batch_mover(torch.device(device), False, pins, rank=0)
    assert isinstance(move.args[0], PinnedCopies) == through_pinned_memory


@pytest.mark.parametrize(
    ("data", "pin_memory"), [(Numbers(4), True), (Stream(4), False)], ids=["map", "stream"]
)
def test_prepared_loaders_pin_for_their_device_if_the_configuration_does(
    monkeypatch: pytest.MonkeyPatch, data: Any, pin_memory: bool
) -> None:
    """The loader that reads keeps the options of the script's."""
    asked: list[tuple[str, bool, bool]] = []

    def note(device: torch.device, non_blocking: bool, pins: bool, rank: int) -> Callable[[Any], Any]:
        asked.append((device.type, non_blocking, pins))
        return lambda batch: batch + 1

    monkeypatch.setattr(module_of(prepare_loader), "batch_mover", note)
    loader = prepare_loader(
        DataLoader(data, batch_size=2),
        runtime=ALONE,
        step=StepState(),
        config=DataLoaderConfiguration(pin_memory=pin_memory, dispatch_batches=False),
        device=torch.device("cuda"),
    )
    assert not loader.inner.pin_memory
    assert [batch.tolist() for batch in loader] == [[1, 2], [3, 4]]
    assert asked == [("cuda", False, pin_memory)]


def test_on_a_cpu_a_batch_is_the_one_that_was_collated() -> None:
    rows = torch.arange(8.0)
    made: list[torch.Tensor] = []

    def collate(items: list[torch.Tensor]) -> torch.Tensor:
        made.append(torch.stack(items))
        return made[-1]

    loader = Accelerator(cpu=True).prepare(DataLoader(rows, batch_size=4, collate_fn=collate))  # type: ignore[arg-type]
    assert all(batch is made[-1] for batch in loader)
    assert len(made) == 2


def test_whether_batches_are_pinned_is_a_truth_value() -> None:
    with pytest.raises(ConfigError, match="pin_memory"):
        DataLoaderConfiguration(pin_memory="false")  # type: ignore[arg-type]
