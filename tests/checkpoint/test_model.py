"""Weights as safetensors, alone or in shards, as others read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from lockstep import Accelerator
from lockstep.checkpoint.model import parse_size
from lockstep.errors import ConfigError, LockstepError
from train import problems


class Tied(nn.Module):
    """An embedding whose weight is that of the output too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.out = nn.Linear(4, 10, bias=False)
        self.out.weight = self.embed.weight


def save(directory: str, max_shard_size: Any, precision: str = "no") -> dict[str, torch.Tensor]:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    plain = problems.make_model()
    accelerator.save_model(accelerator.prepare(plain), directory, max_shard_size=max_shard_size)
    # All ranks return when the files are there.
    assert list(Path(directory).glob("model*.safetensors"))
    return {name: tensor.clone() for name, tensor in plain.state_dict().items()}


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_one_file_holds_a_small_model(
    run_distributed, tmp_path: Path, world_size: int, precision: str
) -> None:
    state = run_distributed(save, world_size, str(tmp_path), "10GB", precision)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert problems.difference(load_file(tmp_path / "model.safetensors"), state) == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_shards_hold_no_more_than_asked_for_and_the_index_names_each(
    run_distributed, tmp_path: Path, world_size: int
) -> None:
    save_single(tmp_path)
    state = run_distributed(save, world_size, str(tmp_path), 200)[0]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == files
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 1
    found = {}
    for file in files:
        part = load_file(tmp_path / file)
        assert sum(tensor.nbytes for tensor in part.values()) <= 200
        assert all(index["weight_map"][name] == file for name in part)
        found.update(part)
    assert problems.difference(found, state) == 0
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())


def save_single(directory: Path) -> None:
    """A save of before, whose file must not stay beside the shards."""
    Accelerator(cpu=True).save_model(problems.make_model(), directory)


def test_tied_weights_are_written_once_and_load_as_tied(tmp_path: Path) -> None:
    model = Tied()
    Accelerator(cpu=True).save_model(model, tmp_path)
    assert list(load_file(tmp_path / "model.safetensors")) == ["embed.weight"]
    other = Tied()
    load_model(other, tmp_path / "model.safetensors")
    assert torch.equal(other.out.weight, model.embed.weight)


@pytest.mark.parametrize("max_shard_size", ["10GB", "40KB"])
def test_transformers_loads_what_was_saved(tmp_path: Path, max_shard_size: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(model)
    accelerator.save_model(prepared, tmp_path, max_shard_size=max_shard_size)
    config.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "40KB")
    loaded, info = transformers.BertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert problems.difference(loaded.state_dict(), accelerator.get_state_dict(prepared)) == 0


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        ("7", 7),
        ("10GB", 10**10),
        ("1.5 mb", 1_500_000),
        ("2KiB", 2048),
        ("3MIB", 3 * 2**20),
        ("1TB", 10**12),
    ],
)
def test_sizes_are_numbers_of_bytes_with_or_without_units(text: Any, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "10 parsecs", "10B5", 0, -5, None, "1IB"])
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(ConfigError, match="max_shard_size"):
        parse_size(text)


def failing_save(directory: str, size: Any, safe: bool) -> str:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(problems.make_model())
    try:
        accelerator.save_model(model, directory, max_shard_size=size, safe_serialization=safe)
    except LockstepError as error:
        return str(error)
    except OSError as error:
        return str(error)
    return ""


def test_a_failure_of_the_writing_rank_is_raised_on_all(run_distributed, tmp_path: Path) -> None:
    for message in run_distributed(failing_save, 2, str(tmp_path), "many", True):
        assert "max_shard_size='many'" in message
    (tmp_path / "file").write_text("")
    for message in run_distributed(failing_save, 2, str(tmp_path / "file"), "1GB", True):
        assert "exists" in message
    for message in run_distributed(failing_save, 2, str(tmp_path), "1GB", False):
        assert "safetensors only" in message


def test_objects_are_saved_once_and_as_safetensors_if_asked(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    state = problems.make_model().state_dict()
    accelerator.save(state, tmp_path / "state.bin")
    accelerator.save(state, tmp_path / "state.safetensors", safe_serialization=True)
    assert problems.difference(torch.load(tmp_path / "state.bin"), state) == 0
    assert problems.difference(load_file(tmp_path / "state.safetensors"), state) == 0
