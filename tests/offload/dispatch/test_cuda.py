"""Placed models on a CUDA device: resident, streamed from the CPU's memory and from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from lockstep.offload.weights import streamer_of
from tests.offload.checkpoints import Net, made, save, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is visible here"),
]

TOKENS = torch.arange(4)
MAPS: list[Any] = [
    {"": 0},
    {
        "embed": 0,
        "head": 0,
        "scale": 0,
        "layers.0": 0,
        "layers.1": "cpu",
        "layers.2": "disk",
        "layers.3": "cpu",
    },
]


@pytest.mark.parametrize("device_map", MAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_spread_model_computes_as_on_one_device(
    tmp_path: Path, device_map: Any, dtype: torch.dtype
) -> None:
    saved = made()
    save(weights(saved), tmp_path / "weights", "sharded")
    with init_empty_weights():
        model = Net().eval()
    model = load_checkpoint_and_dispatch(
        model, tmp_path / "weights", device_map, offload_folder=tmp_path / "offload", dtype=dtype
    )
    plain = made().to(dtype)
    plain.load_state_dict(saved.state_dict())
    plain.cuda().shift = plain.shift.float()  # not in the checkpoint, and so not converted
    tokens = TOKENS.cuda() if device_map == MAPS[0] else TOKENS
    with torch.no_grad():
        for _ in range(3):
            found = model(tokens)
            assert found.device == tokens.device and torch.equal(found.cuda(), plain(TOKENS.cuda()))


def test_offloaded_models_compute_on_the_device(tmp_path: Path) -> None:
    plain = made().cuda()
    with torch.no_grad():
        expected = plain(TOKENS.cuda()).cpu()
        for model in (cpu_offload(made(), 0), disk_offload(made(), tmp_path, "cuda")):
            assert streamer_of(model) is not None
            for _ in range(3):
                assert torch.equal(model(TOKENS), expected)


def test_models_take_turns_on_the_device() -> None:
    first, hook = cpu_offload_with_hook(made(), 0)
    second, other = cpu_offload_with_hook(made(seed=1), 0, prev_module_hook=hook)
    with torch.no_grad():
        assert first(TOKENS).is_cuda and first.scale.is_cuda
        assert second(TOKENS).is_cuda and second.scale.is_cuda and not first.scale.is_cuda
    other.offload()
    assert not second.scale.is_cuda
