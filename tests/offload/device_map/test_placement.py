"""Where tensors are at rest and used, on machines with accelerators that are not here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.offload.device_map import TensorPlacement, assign_placements, main_device_of
from lockstep.offload.dispatch import cross_devices
from lockstep.utils import check_device_map
from tests.offload.checkpoints import Net, made
from tests.refusals import expect_refusal

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def two_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


def placements_of(model: nn.Module, device_map: dict[str, Any], **options: Any) -> dict[str, TensorPlacement]:
    check_device_map(model, device_map)
    placements = assign_placements(model, device_map, main_device_of(device_map), **options)
    return {placement.name: placement for placement in placements}


SPREAD = {
    "embed": 0,
    "head": "cuda:0",
    "scale": FIRST,
    "layers.0": 0,
    "layers.1": "cuda:1",
    "layers.2": "cpu",
    "layers.3": "disk",
}


@pytest.mark.usefixtures("two_accelerators")
def test_offloaded_weights_are_used_on_the_main_device() -> None:
    placements = placements_of(made(), SPREAD)
    found = {
        name: (placement.device, placement.on_disk, placement.execution, placement.is_offloaded)
        for name, placement in placements.items()
        if name.endswith("up.weight") or name in ("embed.weight", "shift")
    }
    assert found == {
        "embed.weight": (FIRST, False, FIRST, False),
        "layers.0.up.weight": (FIRST, False, FIRST, False),
        "layers.1.up.weight": (SECOND, False, SECOND, False),
        "layers.2.up.weight": (CPU, False, FIRST, True),
        "layers.3.up.weight": (CPU, True, FIRST, True),
        "shift": (FIRST, False, FIRST, False),
    }


@pytest.mark.usefixtures("two_accelerators")
def test_buffers_stay_where_they_are_used_unless_asked_otherwise() -> None:
    name = "layers.3.norm.running_mean"
    assert placements_of(made(), SPREAD)[name].device == FIRST
    offloaded = placements_of(made(), SPREAD, offload_buffers=True)[name]
    assert offloaded.on_disk and offloaded.execution == FIRST


@pytest.mark.usefixtures("two_accelerators")
def test_a_tied_weight_is_not_used_on_two_devices() -> None:
    expect_refusal(ConfigError, "cuda:1", placements_of, made(), SPREAD | {"head": 1})
    assert placements_of(made(), SPREAD | {"head": "disk"})["embed.weight"].device == FIRST
    expect_refusal(ConfigError, "0, 1, 'cpu', 'disk'", placements_of, made(), SPREAD | {"head": 2})


def test_inputs_go_to_each_modules_device_and_outputs_back() -> None:
    seen: dict[str, list[str]] = {}

    class Recorder(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.label = name

        def forward(self, x: torch.Tensor, **named: torch.Tensor) -> dict[str, torch.Tensor]:
            seen[self.label] = [x.device.type, *(value.device.type for value in named.values())]
            return {"x": x, **named}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Recorder("first"), Recorder("last")

        def forward(self, x: torch.Tensor, cache: torch.Tensor) -> Any:
            self.first(x, cache=cache)
            return self.last(x, cache=cache)

    model = Model()
    meta, here = torch.device("meta"), torch.ones(1)
    handles = cross_devices(model, {"last": meta}, CPU, skip_keys="cache")
    with pytest.raises(NotImplementedError):
        model(here, cache=here)
    assert seen == {"first": ["cpu", "cpu"], "last": ["meta", "cpu"]}
    for handle in handles:
        handle.remove()
    assert model(here, cache=here)["x"] is here


def test_the_main_device_is_the_cpu_without_accelerators() -> None:
    assert main_device_of({"": "disk"}) == CPU
    placements = placements_of(Net(2), {"": "disk"})
    assert {placement.execution for placement in placements.values()} == {CPU}
    assert {name for name, placement in placements.items() if not placement.on_disk} == {
        name for name, _ in Net(2).named_buffers()
    }
