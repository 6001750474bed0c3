"""Weights of files in a model: the values, where they are, and what is refused before the model changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

from lockstep import load_checkpoint_and_dispatch
from lockstep.errors import CheckpointError, ConfigError, OffloadError
from lockstep.offload.files import file_mappings, is_in_file
from lockstep.utils import load_checkpoint_in_model
from tests.offload.checkpoints import empty, held, made, save, weights
from tests.refusals import expect_refusal

TOKENS = torch.arange(12).view(3, 4)[:, 0]
HALVES = {"embed": "cpu", "head": "cpu", "scale": "cpu", "layers.0": "cpu"} | {
    f"layers.{index}": "disk" for index in range(1, 4)
}


@pytest.mark.parametrize(
    ("form", "device_map"),
    [
        ("safetensors", None),
        ("sharded", {"": "cpu"}),
        ("safetensors", {"": "disk"}),
        ("bin", {"": "disk"}),
        ("bin", HALVES),
        ("sharded", "auto"),
    ],
)
def test_a_loaded_model_computes_what_the_saved_one_did(tmp_path: Path, form: str, device_map: Any) -> None:
    saved = made()
    save(weights(saved), tmp_path / "weights", form)
    folder = tmp_path / "offload" if form == "bin" else None
    model = load_checkpoint_and_dispatch(
        empty(), tmp_path / "weights", device_map, offload_folder=folder, strict=True
    )
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(TOKENS), saved(TOKENS))
    assert model.head.weight is model.embed.weight
    for name, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert model.shift.tolist() == saved.shift.tolist()
    mappings = file_mappings()
    in_files = {name for name, tensor in model.named_parameters() if is_in_file(tensor, mappings)}
    if form != "bin":
        assert in_files == {name for name, _ in model.named_parameters()}
    elif isinstance(device_map, dict):
        disk = [name for name, device in device_map.items() if device == "disk"]
        assert in_files == {
            name for name, _ in model.named_parameters() if any(name.startswith(entry) for entry in disk)
        }
    assert not any(is_in_file(buffer, mappings) for buffer in model.buffers())


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_model_may_be_loaded_and_dispatched_again(tmp_path: Path, form: str) -> None:
    model = empty()
    for number, device_map in enumerate([{"": "disk"}, HALVES, {"": "cpu"}, HALVES, "auto", {"": "disk"}]):
        saved = made()
        with torch.no_grad():
            saved.embed.weight.add_(number)
        save(weights(saved), tmp_path / f"weights{number}", form)
        folder = tmp_path / f"offload{number}" if form == "bin" else None
        load_checkpoint_and_dispatch(model, tmp_path / f"weights{number}", device_map, offload_folder=folder)
        with torch.no_grad():
            assert torch.equal(model(TOKENS), saved(TOKENS))
    before = model.state_dict()
    with pytest.raises(CheckpointError):
        load_checkpoint_and_dispatch(model, tmp_path / "nothing", {"": "cpu"})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("device_map", [{"": "cpu"}, HALVES])
def test_a_dtype_is_what_accelerate_makes_of_it(tmp_path: Path, device_map: Any) -> None:
    save(weights(made()), tmp_path / "weights", "safetensors")
    theirs = empty()
    accelerate.load_checkpoint_in_model(
        theirs, tmp_path / "weights", {"": "cpu"}, dtype="bfloat16", strict=False
    )
    ours = empty()
    load_checkpoint_in_model(
        ours, tmp_path / "weights", device_map, tmp_path / "offload", torch.bfloat16, offload_buffers=True
    )
    expected = theirs.state_dict()
    for name, value in ours.state_dict().items():
        assert value.dtype == (expected[name].dtype) and torch.equal(value, expected[name]), name
    assert ours.embed.weight.dtype == torch.bfloat16 and ours.shift.dtype == torch.float32
    assert ours.layers[0].norm.num_batches_tracked.dtype == torch.int64


def test_without_a_dtype_weights_become_what_the_model_has(tmp_path: Path) -> None:
    saved = made()
    save({name: value.double() for name, value in weights(saved).items()}, tmp_path, "safetensors")
    for device_map in (None, {"": "cpu"}):
        model = empty()
        load_checkpoint_in_model(model, tmp_path, device_map)
        assert model.scale.dtype == torch.float32 and torch.equal(model.scale, saved.scale)
    model = empty()
    expect_refusal(ConfigError, "offload_folder", load_checkpoint_in_model, model, tmp_path, {"": "disk"})
    assert model.scale.is_meta
    load_checkpoint_in_model(model, tmp_path, None, dtype="float16", keep_in_fp32_modules=["norm", "scale"])
    dtypes = {name: tensor.dtype for name, tensor in model.named_parameters()}
    assert dtypes["layers.0.norm.weight"] == dtypes["scale"] == torch.float32
    assert dtypes["layers.0.up.weight"] == torch.float16


def test_values_are_loaded_in_place_without_a_map(tmp_path: Path) -> None:
    saved, model = made(), made(seed=1)
    save(weights(saved), tmp_path, "safetensors")
    before = held(model)
    load_checkpoint_in_model(model, tmp_path)
    assert held(model) == before
    assert torch.equal(model(TOKENS), saved(TOKENS))


class Base(nn.Module):
    base_model_prefix = "base"

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


class WithHead(nn.Module):
    base_model_prefix = "base"

    def __init__(self) -> None:
        super().__init__()
        self.base = Base()
        self.head = nn.Linear(2, 2)


def test_keys_of_a_model_without_its_head_fit_and_the_other_way_round(tmp_path: Path) -> None:
    base, whole = Base(), WithHead()
    save(base.state_dict(), tmp_path / "base", "safetensors")
    save(whole.state_dict(), tmp_path / "whole", "safetensors")
    other = WithHead()
    head = other.head.weight.clone()
    load_checkpoint_in_model(other, tmp_path / "base")
    assert torch.equal(other.base.inner.weight, base.inner.weight) and torch.equal(other.head.weight, head)
    load_checkpoint_in_model(base, tmp_path / "whole")
    assert torch.equal(base.inner.weight, whole.base.inner.weight)
    expect_refusal(CheckpointError, "'head", load_checkpoint_in_model, base, tmp_path / "whole", strict=True)


@pytest.mark.parametrize("device_map", [None, HALVES])
def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path, device_map: Any) -> None:
    tensors = weights(made())

    def refused(changed: dict[str, torch.Tensor], message: str, model: nn.Module, **options: Any) -> None:
        folder = save(changed, tmp_path / str(len(list(tmp_path.iterdir()))), "safetensors")
        before = held(model)
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint_and_dispatch(model, folder, device_map, **options)
        assert held(model) == before and not hasattr(model, "hf_device_map")

    without = {name: value for name, value in tensors.items() if name != "layers.2.up.bias"}
    refused(without, "does not have 'layers.2.up.bias', which have no values in the model", empty())
    refused(without, "missing 'layers.2.up.bias'; unexpected none", made(), strict=True)
    refused(tensors | {"extra": torch.ones(1)}, "unexpected 'extra'", empty(), strict=True)
    refused(tensors | {"scale": torch.ones(7)}, r"scale is \(7,\) there and \(32,\) in the model", empty())
    broken = save(tensors, tmp_path / "broken", "sharded")
    shard = broken / "layers-3.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    model = empty()
    with pytest.raises(CheckpointError, match=r"layers-3\.safetensors"):
        load_checkpoint_and_dispatch(model, broken, device_map)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_missing_weights_keep_the_values_they_have(tmp_path: Path) -> None:
    saved, model = made(), made(seed=1)
    tensors = {name: value for name, value in weights(saved).items() if name != "scale"}
    save(tensors | {"extra": torch.ones(1)}, tmp_path, "safetensors")
    scale = model.scale.clone()
    load_checkpoint_in_model(model, tmp_path, {"": "cpu"})
    assert torch.equal(model.scale, scale) and torch.equal(model.embed.weight, saved.embed.weight)


@pytest.mark.parametrize(
    "options",
    [{"offload_8bit_bnb": True}, {"broadcast_from_rank0": True}, {"full_state_dict": False}, {"dtype": "f"}],
)
def test_arguments_without_an_effect_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    save(weights(made()), tmp_path, "safetensors")
    with pytest.raises(ConfigError):
        load_checkpoint_in_model(empty(), tmp_path, **options)


PEAK = """
import os, sys
from torch import nn
from lockstep import init_empty_weights
from lockstep.offload.dispatch import load_checkpoint_in_model

def memory(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(key)) * 1024

def peak(form, device, dtype):
    folder = f"{sys.argv[1]}/{form}"
    with init_empty_weights():
        model = nn.Sequential(*(nn.Linear(4096, 2048, bias=False) for _ in range(6)))
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = memory("VmRSS")
    load_checkpoint_in_model(model, folder, {"": device}, folder + "/offload", dtype)
    return memory("VmHWM") - before

peak("safetensors", "disk", "float32")  # what is imported then is not measured
for case in sys.argv[2:]:
    if os.fork() == 0:  # each with a heap of its own
        print(peak(*case.split()), flush=True)
        os._exit(0)
    os.wait()
"""


def test_loading_takes_no_more_memory_than_the_model_and_one_layer(tmp_path: Path) -> None:
    layer, slack = 4096 * 2048 * 4, 12 * 2**20  # buffers, and what the allocator keeps
    tensors = {f"{index}.weight": torch.zeros(2048, 4096) for index in range(6)}
    save(tensors, tmp_path / "safetensors", "sharded")
    save(tensors, tmp_path / "bin", "bin")
    limits = {  # what is kept in memory, and what is needed meanwhile
        "safetensors cpu float32": 0,  # mapped
        "safetensors disk float32": 0,
        "safetensors cpu bfloat16": 3 * layer + layer,
        "safetensors disk bfloat16": layer,
        "bin cpu float32": 6 * layer + layer,
        "bin disk float32": layer,
    }
    command = [sys.executable, "-c", PEAK, str(tmp_path), *limits]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    peaks = dict(zip(limits, map(int, done.stdout.split()), strict=True))
    assert {case: peak for case, peak in peaks.items() if peak > limits[case] + slack} == {}, peaks


def test_a_full_disk_leaves_the_model_and_no_files(tmp_path: Path) -> None:
    import resource

    save(weights(made()), tmp_path / "weights", "bin")
    model, folder = empty(), tmp_path / "offload"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OffloadError, match=r"needs \d+ bytes"):
            load_checkpoint_and_dispatch(model, tmp_path / "weights", {"": "disk"}, offload_folder=folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert [path.name for path in folder.iterdir()] == [".offload.lock"]
