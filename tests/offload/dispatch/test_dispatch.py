"""Placed models: what runs, what is streamed, and what is refused before anything changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import accelerate.utils.offload as theirs
import pytest
import torch
from torch import nn

from lockstep import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
)
from lockstep.errors import ConfigError, OffloadError, UsageError
from lockstep.hooks import remove_hook_from_submodules
from lockstep.offload.files import file_mappings, is_in_file
from lockstep.offload.weights import streamer_of
from lockstep.utils import (
    align_module_device,
    get_state_dict_offloaded_model,
    has_offloaded_params,
    load_checkpoint_in_model,
    offload_state_dict,
)
from tests.offload.checkpoints import WIDTH, empty, held, made, save, weights
from tests.refusals import expect_refusal

TOKENS = torch.arange(4)
DISK = {"": "disk"}
BLOCK = sum(tensor.nbytes for tensor in made(1).layers[0].parameters())


def run(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_a_model_in_memory_is_written_to_the_folder_and_streamed(tmp_path: Path) -> None:
    model = made()
    expected, state = run(model), {name: value.clone() for name, value in model.state_dict().items()}
    assert disk_offload(model, tmp_path) is model
    assert files(tmp_path) == ["index.json", "offload-00001.safetensors"]
    streamer = streamer_of(model)
    assert streamer is not None and len(streamer.groups) == 6  # embedding with head, scale, four blocks
    assert all(torch.equal(run(model), expected) for _ in range(3))
    assert is_in_file(model.embed.weight, file_mappings()) and model.head.weight is model.embed.weight
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    assert {name: tensor.tolist() for name, tensor in get_state_dict_offloaded_model(model).items()} == {
        name: tensor.tolist() for name, tensor in state.items()
    }
    remove_hook_from_submodules(model)
    assert streamer_of(model) is None
    model.half().float()


def test_an_offload_folder_is_used_again_if_it_fits(tmp_path: Path) -> None:
    expected = run(made())
    disk_offload(made(), tmp_path)
    before = (tmp_path / "offload-00001.safetensors").stat()
    with_buffers = dict(made().named_buffers())
    for model in (made(), empty()):  # its values are compared; there are none to compare
        disk_offload(model, tmp_path)
        model.load_state_dict(with_buffers, strict=False)
        assert torch.equal(run(model), expected)
    assert (tmp_path / "offload-00001.safetensors").stat() == before
    expect_refusal(OffloadError, "'scale'", disk_offload, made(seed=1), tmp_path)
    expect_refusal(OffloadError, "torch.float64", disk_offload, made().double(), tmp_path)
    more = made(6)  # its first four blocks are others
    expect_refusal(OffloadError, "other values", disk_offload, more, tmp_path)
    offload_state_dict(tmp_path, {"one.more": torch.ones(3)})
    assert files(tmp_path) == ["index.json", "offload-00001.safetensors", "offload-00002.safetensors"]


@pytest.mark.parametrize("damage", ["index", "entry", "cut", "gone"])
def test_a_damaged_offload_folder_is_refused(tmp_path: Path, damage: str) -> None:
    disk_offload(made(), tmp_path)
    index, part = tmp_path / "index.json", tmp_path / "offload-00001.safetensors"
    if damage == "index":
        index.write_text("{")
    elif damage == "entry":
        entries = json.loads(index.read_text())
        entries["scale"]["weight_name"] = "other"
        index.write_text(json.dumps(entries))
    elif damage == "cut":
        part.write_bytes(part.read_bytes()[:-1])
    else:
        part.unlink()
    for model in (made(), empty()):
        before = held(model)
        with pytest.raises(OffloadError, match=r"cannot be used|is damaged|cannot be read"):
            disk_offload(model, tmp_path)
        assert held(model) == before and streamer_of(model) is None


def test_a_folder_of_accelerate_is_understood(tmp_path: Path) -> None:
    model = made()
    theirs.offload_state_dict(str(tmp_path), model.state_dict())
    copy = empty()
    disk_offload(copy, tmp_path, offload_buffers=False)
    for (name, ours), value in zip(copy.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, value), name


def test_an_index_of_safetensors_files_gives_values(tmp_path: Path) -> None:
    model, copy = made(), empty()
    save(weights(model), tmp_path, "safetensors")
    path = str(tmp_path / "model.safetensors")
    index = {name: {"safetensors_file": path, "weight_name": name} for name in weights(model)}
    dispatch_model(copy, DISK, offload_index=index, offload_buffers=True)
    assert torch.equal(run(copy), run(model))


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_budget_is_kept_for_all_that_is_in_files(tmp_path: Path, form: str) -> None:
    saved = made(8)
    save(weights(saved), tmp_path / "weights", form)
    total = sum(tensor.nbytes for tensor in saved.parameters())
    share = total // 2

    def loaded(**options: Any) -> nn.Module:
        folder = tmp_path / "offload" if form == "bin" else None
        return load_checkpoint_and_dispatch(
            empty(8),
            tmp_path / "weights",
            offload_folder=folder,
            no_split_module_classes=["Block"],
            **options,
        )

    model = loaded(device_map="auto", max_memory={"cpu": share})
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    assert torch.equal(run(model), run(saved))
    streamer = streamer_of(model)
    assert streamer is not None
    in_memory = sum(buffer.nbytes for buffer in model.buffers())
    if form == "bin":  # what is on the CPU is in memory, and counts
        cpu = [name for name, device in model.hf_device_map.items() if device == "cpu"]
        own = {id(p): p.nbytes for name in cpu for p in _parameters(model, name)}
        in_memory += sum(own.values())
    assert streamer.budget == share - in_memory
    assert streamer.counters.peak_bytes <= streamer.budget
    model = loaded(device_map=DISK, memory_budget=share)
    assert torch.equal(run(model), run(saved))
    assert streamer_of(model).budget == share - sum(buffer.nbytes for buffer in model.buffers())  # type: ignore[union-attr]
    assert streamer_of(loaded(device_map="auto")) is None  # all of it fits
    if form == "safetensors":
        model = loaded(device_map={"": "cpu"}, max_memory={"cpu": share})
        assert torch.equal(run(model), run(saved))
        assert streamer_of(model).counters.peak_bytes <= share  # type: ignore[union-attr]


def _parameters(model: nn.Module, name: str) -> list[torch.Tensor]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [tensor for key, tensor in parameters.items() if key == name or key.startswith(f"{name}.")]


def test_a_budget_that_is_too_small_changes_nothing(tmp_path: Path) -> None:
    save(weights(made()), tmp_path / "weights", "safetensors")
    for budget, message in [
        (BLOCK // 2, "budget"),
        (100, "budget of 100 bytes on cpu"),
    ]:
        model = empty()
        with pytest.raises(OffloadError, match=message):
            load_checkpoint_and_dispatch(model, tmp_path / "weights", DISK, memory_budget=budget)
        assert all(parameter.is_meta for parameter in model.parameters()) and streamer_of(model) is None
        assert not hasattr(model, "hf_device_map")
    for wrong in ({"memory_budget": 0}, {"memory_budget": "much"}, {"max_memory": {"cpu": 0}}):
        with pytest.raises(ConfigError):
            load_checkpoint_and_dispatch(empty(), tmp_path / "weights", DISK, **wrong)
    model = made()
    expect_refusal(OffloadError, "stay there", dispatch_model, model, {"": "cpu"}, memory_budget=1000)


def test_what_cannot_be_placed_is_refused(tmp_path: Path) -> None:
    expect_refusal(ConfigError, "no file has them", dispatch_model, made(), DISK)
    expect_refusal(UsageError, "no values", dispatch_model, empty(), {"": "cpu"})
    expect_refusal(ConfigError, "automatic", dispatch_model, made(), "automatic")
    expect_refusal(ConfigError, "'scale'", dispatch_model, empty(), DISK, state_dict={"scale": torch.ones(3)})
    with pytest.raises(OffloadError):
        (tmp_path / "file").touch()
        disk_offload(made(), tmp_path / "file")
    expect_refusal(ConfigError, "main_device='disk'", dispatch_model, made(), {"": "cpu"}, main_device="disk")
    model = disk_offload(made(), tmp_path / "folder")
    expect_refusal(UsageError, "already", dispatch_model, model, {"": "cpu"})


def test_a_dispatched_model_is_not_moved(tmp_path: Path) -> None:
    model = disk_offload(made(), tmp_path)
    expected = run(model)
    for move in (
        lambda: model.to("cuda"),
        lambda: model.cuda(),
        lambda: model.half(),
        lambda: model.to(torch.bfloat16),
        lambda: model.to_empty(device="cpu"),
        lambda: model.to(memory_format=torch.channels_last),
        lambda: model.share_memory(),
    ):
        with pytest.raises(UsageError):
            move()
    assert model.to("cpu") is model.cpu() is model.float() is model
    assert torch.equal(run(model), expected)


def test_buffers_stay_in_memory_and_may_be_written_to(tmp_path: Path) -> None:
    save(weights(made()), tmp_path, "safetensors")
    plain, model = made(), load_checkpoint_and_dispatch(empty(), tmp_path, DISK)
    for each in (plain, model):
        each.train()
        for _ in range(3):
            run(each)
    for (name, ours), value in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, value), name
    assert model.layers[0].norm.num_batches_tracked == 3
    offloaded = load_checkpoint_and_dispatch(empty(), tmp_path, DISK, offload_buffers=True)
    mappings = file_mappings()
    assert is_in_file(offloaded.layers[0].norm.running_mean, mappings)
    assert not is_in_file(offloaded.shift, mappings)


def test_weights_that_were_edited_in_memory_are_not_lost(tmp_path: Path) -> None:
    save(weights(made()), tmp_path / "weights", "safetensors")
    model = empty()
    load_checkpoint_in_model(model, tmp_path / "weights")
    with torch.no_grad():
        model.scale.mul_(2)
    expected = run(model)
    dispatch_model(model, DISK, offload_dir=tmp_path / "offload", memory_budget=3 * BLOCK)
    assert all(torch.equal(run(model), expected) for _ in range(3))


def test_offloading_to_the_cpu_of_a_cpu_changes_nothing_but_takes_given_values() -> None:
    model, other = made(), made(seed=1)
    assert cpu_offload(model) is model and streamer_of(model) is None
    assert torch.equal(run(model), run(made()))
    copy = cpu_offload(empty(), state_dict=other.state_dict())
    assert torch.equal(run(copy), run(other)) and copy.head.weight is copy.embed.weight


def test_modules_know_whether_they_are_offloaded_and_can_be_aligned(tmp_path: Path) -> None:
    model = dispatch_model(made(), {"": "disk"}, offload_dir=tmp_path)
    assert model.hf_device_map == {"": "disk"}
    assert has_offloaded_params(model.layers[0].up) and not has_offloaded_params(
        model.layers[0].norm.__class__(3)
    )
    plain = nn.Linear(WIDTH, 2)
    with align_module_device(plain, "meta"):
        assert plain.weight.is_meta
    with align_module_device(plain, "cpu"), torch.no_grad():
        plain.weight.fill_(3)
    assert plain.weight.tolist() == [[3.0] * WIDTH] * 2
    with align_module_device(model.layers[0].up):
        assert torch.equal(model.layers[0].up.weight, made().layers[0].up.weight)


def test_models_take_turns() -> None:
    log: list[str] = []

    class Logged(nn.Linear):
        def __init__(self, name: str) -> None:
            super().__init__(2, 2)
            self.label = name

        def to(self, device: Any) -> Any:  # type: ignore[override]
            log.append(f"{self.label} to {torch.device(device)}")
            return super().to(device)

    first, hook = cpu_offload_with_hook(Logged("first"), "cpu")
    second, other = cpu_offload_with_hook(Logged("second"), "cpu", prev_module_hook=hook)
    log.clear()
    second(first(torch.ones(1, 2)))
    assert log == ["first to cpu", "first to cpu", "second to cpu"]
    other.offload()
    assert log[-1] == "second to cpu"
    hook.remove()
    other.remove()
    log.clear()
    second(first(torch.ones(1, 2)))
    assert log == []
