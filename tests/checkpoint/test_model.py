"""Weights as safetensors, alone or in shards, as others read them."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from lockstep import Accelerator
from lockstep.checkpoint.store import LocalStore
from lockstep.checkpoint.weights import (
    INDEX,
    WEIGHTS,
    WeightsFolder,
    collect_stages,
    parse_size,
    write_weights,
)
from lockstep.comm import whole
from lockstep.errors import CheckpointError, ConfigError, LockstepError, UsageError
from tests.patching import module_of
from tests.refusals import expect_refusal
from tests.warm_interpreter import WarmInterpreter
from train import problems


def save(directory: str, max_shard_size: Any, precision: str = "no") -> dict[str, torch.Tensor]:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    plain = problems.make_model()
    accelerator.save_model(accelerator.prepare(plain), directory, max_shard_size=max_shard_size)
    # All ranks return when the files are there.
    assert list(Path(directory).glob("model*.safetensors"))
    return {name: tensor.clone() for name, tensor in plain.state_dict().items()}


@pytest.mark.parametrize(("world_size", "precision"), [(1, "no"), (2, "bf16")])
def test_one_file_holds_a_small_model(
    run_distributed, tmp_path: Path, world_size: int, precision: str
) -> None:
    state = run_distributed(save, world_size, str(tmp_path), "10GB", precision)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert problems.difference(load_file(tmp_path / "model.safetensors"), state) == 0


@pytest.mark.parametrize("world_size", [2])
def test_shards_hold_no_more_than_asked_for_and_the_index_names_each(
    run_distributed, tmp_path: Path, world_size: int
) -> None:
    # A save of before, whose file must not stay beside the shards.
    Accelerator(cpu=True).save_model(problems.make_model(), tmp_path)
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


def bert() -> Any:
    """Tied output embeddings, whose own name transformers makes from the other's."""
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
    )


def llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=7)
    )


def mixtral() -> Any:
    """Experts whose weights the module fuses, under other names than on the hub."""
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=4))


def t5() -> Any:
    """Four names for one tensor."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    )


SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MODELS = {"bert": bert, "llama": llama, "mixtral": mixtral, "t5": t5}


@pytest.mark.parametrize(
    ("name", "max_shard_size"), [("bert", "10GB"), ("llama", "20KB"), ("mixtral", "20KB"), ("t5", "10GB")]
)
def test_transformers_loads_what_was_saved_and_nothing_else_is_needed(
    tmp_path: Path, name: str, max_shard_size: str
) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(model)
    accelerator.save_model(prepared, tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / INDEX).exists() == (max_shard_size == "20KB")
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.dtype == torch.float32
    assert problems.difference(loaded.state_dict(), accelerator.get_state_dict(prepared)) == 0


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.float32), ("t5", torch.bfloat16)])
def test_configurations_and_names_are_those_that_save_pretrained_writes(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    model = MODELS[name]().to(dtype)
    model.save_pretrained(tmp_path / "theirs")
    Accelerator(cpu=True).save_model(model, tmp_path / "ours")
    ours, theirs = files_of(tmp_path / "ours"), files_of(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for file in ours.keys() - {WEIGHTS}:
        assert json.loads(ours[file]) == json.loads(theirs[file])
    assert json.loads(ours["config.json"])["dtype"] == str(dtype).removeprefix("torch.")
    found, expected = (load_file(tmp_path / who / WEIGHTS) for who in ("ours", "theirs"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_what_a_model_of_transformers_does_not_want_saved_is_left_out(tmp_path: Path) -> None:
    model = bert()
    model._keys_to_ignore_on_save = ["cls.predictions.bias"]
    Accelerator(cpu=True).save_model(model, tmp_path)
    model.save_pretrained(tmp_path / "theirs")
    assert load_file(tmp_path / WEIGHTS).keys() == load_file(tmp_path / "theirs" / WEIGHTS).keys()


class Linked(transformers.PreTrainedModel):
    """The tied name comes first in the state."""

    config_class = transformers.BertConfig
    _tied_weights_keys = {"copy.weight": "own.weight"}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.copy, self.own = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.post_init()
        self.copy.weight = self.own.weight


def test_of_tied_weights_the_one_that_others_are_made_from_is_written(tmp_path: Path) -> None:
    model = Linked(transformers.BertConfig())
    assert next(iter(model.state_dict())) == "copy.weight"
    Accelerator(cpu=True).save_model(model, tmp_path)
    assert list(load_file(tmp_path / WEIGHTS)) == ["own.weight"]


def save_zero(directory: str, stage: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = bert()
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    accelerator = Accelerator(cpu=True, parallel=f"zero={stage}")
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_model(prepared, directory, max_shard_size="20KB")
    return plain


@pytest.mark.parametrize("stage", [3])
def test_transformers_loads_what_a_sharded_run_saved(run_distributed, tmp_path: Path, stage: int) -> None:
    state = run_distributed(save_zero, 2, str(tmp_path), stage)[0]
    assert json.loads((tmp_path / "config.json").read_bytes())["architectures"] == ["BertForMaskedLM"]
    loaded, info = transformers.BertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert problems.difference(loaded.state_dict(), state) == 0


def most_gathered(directory: str) -> tuple[int, int]:
    """How many gathered tensors are in memory at a time, at the most, and how many there are in all."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    accelerator = Accelerator(cpu=True, parallel="zero=3")
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    storages: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        tensor = whole(*args, **kwargs)
        storages.append(weakref.ref(torch.empty(0) if tensor is None else tensor.untyped_storage()))
        deadline = time.monotonic() + 5
        while (count := sum(storage() is not None for storage in storages)) > 2:
            if time.monotonic() > deadline:
                break
            time.sleep(0.001)  # gloo's threads let go of a collective's tensors a moment after it is done
        alive.append(count)
        return tensor

    with mock.patch.object(module_of(collect_stages), "whole", watched):
        accelerator.save_model(prepared, directory)
    return max(alive), len(storages)


def test_two_gathered_tensors_are_the_most_in_memory(run_distributed, tmp_path: Path) -> None:
    first, second = run_distributed(most_gathered, 2, str(tmp_path))
    assert first == (2, 16)
    assert second == (0, 16)
    assert len(load_file(tmp_path / WEIGHTS)) == 16


def failing_disk(directory: str) -> str:
    """The message of every rank when rank 0's disk is full after some bytes, with others waiting to be gathered."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    accelerator = Accelerator(cpu=True, parallel="zero=3")
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_model(prepared, directory, max_shard_size="20KB")
    write, left = os.write, [4]

    def full(handle: int, content: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, content)

    with mock.patch("os.write", full), pytest.raises(LockstepError) as caught:
        accelerator.save_model(prepared, directory, max_shard_size="20KB")
    return str(caught.value)


def test_a_full_disk_fails_on_all_ranks_and_leaves_the_earlier_weights(
    run_distributed, tmp_path: Path
) -> None:
    messages = run_distributed(failing_disk, 2, str(tmp_path))
    for message in messages:
        assert "model-00002-of-00004.safetensors.partial could not be written at tensor 1." in message
        assert "No space left on device" in message
        assert "Make room" in message
    assert len(loaded_as_transformers_does(tmp_path)) == 8
    assert not list(tmp_path.glob("*.partial"))


def loaded_as_transformers_does(folder: Path) -> dict[str, torch.Tensor]:
    """One file if it is there, else what the index names."""
    if (folder / WEIGHTS).exists():
        return load_file(folder / WEIGHTS)
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    parts = {file: load_file(folder / file) for file in set(places.values())}
    return {name: parts[file][name] for name, file in places.items()}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def weights(number: int, count: int = 4) -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.full((8, 16), float(10 * number + i)) for i in range(count)}


SIZES = {"one file": 10**6, "2 shards": 1024, "4 shards": 512}


@pytest.mark.parametrize(
    ("before", "after"), [("one file", "4 shards"), ("4 shards", "2 shards"), ("2 shards", "one file")]
)
def test_a_save_leaves_its_own_files_and_those_of_others(tmp_path: Path, before: str, after: str) -> None:
    others = {"tokenizer.json": b"{}", "model.txt": b"x", "model-best.safetensors": b"y", "a.partial": b"z"}
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
    write_weights(weights(1), tmp_path, SIZES[before])
    write_weights(weights(2), tmp_path, SIZES[after])
    found = files_of(tmp_path)
    assert {name: found.pop(name) for name in others} == others
    count = {"one file": 1, "2 shards": 2, "4 shards": 4}[after]
    shards = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert sorted(found) == ([WEIGHTS] if count == 1 else [*shards, INDEX])
    assert problems.difference(loaded_as_transformers_does(tmp_path), weights(2)) == 0


KILLED = """
import os, sys
import torch
from lockstep.checkpoint.weights import write_folder
from lockstep.checkpoint.weights import write_weights

folder, before, after = sys.argv[1:]
weights = lambda number: {f"layer.{i}": torch.full((8, 16), float(10 * number + i)) for i in range(4)}
os.fsync = lambda handle: None
real = {name: getattr(os, name) for name in ("open", "write", "fsync", "rename", "unlink", "link", "mkdir")}
done = 0

def counted(name, last):
    def call(*args, **kwargs):
        global done
        done += 1
        if done == last:
            if name == "write":
                real["write"](args[0], bytes(args[1])[: len(args[1]) // 2])
            os._exit(9)
        return real[name](*args, **kwargs)
    return call

point = 0
while True:
    point += 1
    place = f"{folder}/{point}"
    write_weights(weights(1), place, before)
    child = os.fork()
    if child == 0:
        for name in real:
            setattr(os, name, counted(name, point))
        write_weights(weights(2), place, after)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) == 0:
        break
    assert os.waitstatus_to_exitcode(status) == 9
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("one file", "2 shards"),
        ("2 shards", "one file"),
    ],
)
def test_a_save_that_is_killed_anywhere_leaves_the_earlier_weights_or_the_new_ones(
    warm_interpreter: WarmInterpreter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    after: str,
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    script, folder = tmp_path / "killed.py", tmp_path / "points"
    script.write_text(KILLED)
    folder.mkdir()
    code, output = warm_interpreter.run(script, str(folder), str(SIZES[before]), str(SIZES[after]))
    assert code == 0, output
    points = sorted(folder.iterdir(), key=lambda place: int(place.name))
    states = []
    for point in points:
        found = loaded_as_transformers_does(point)
        states.append(int(found["layer.0"][0, 0]) // 10)
        assert problems.difference(found, weights(states[-1])) == 0
        # The next save succeeds, and nothing of the killed one is left.
        write_weights(weights(3), point, SIZES[after])
        assert problems.difference(loaded_as_transformers_does(point), weights(3)) == 0
        assert {name for name in files_of(point) if not name.startswith(".")} == set(files_of(points[-1]))
    assert len(points) > 10
    assert states == sorted(states)
    assert set(states) == {1, 2}


def test_two_processes_do_not_write_one_folder_at_a_time(tmp_path: Path) -> None:
    with WeightsFolder(str(tmp_path)):
        code = (
            "import sys, torch\nfrom lockstep.checkpoint.weights import write_weights\n"
            "write_weights({'a': torch.ones(1)}, sys.argv[1])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert f"is being written by process {os.getpid()}" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStore, "free_bytes", lambda self, directory: 2047)
    expect_refusal(CheckpointError, "2048 bytes, but 2047", write_weights, weights(1), tmp_path)
    assert list(tmp_path.iterdir()) == []


class Stateful(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Stateful({"a": 1}), "_extra_state is a dict"),
        (nn.Linear(2, 2, device="meta"), "weight is on the meta device"),
        (Stateful(torch.ones(2, dtype=torch.complex128)), "torch.complex128"),
    ],
)
def test_what_safetensors_cannot_hold_is_named(tmp_path: Path, model: nn.Module, message: str) -> None:
    expect_refusal(UsageError, message, Accelerator(cpu=True).save_model, model, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_a_url_is_refused_and_a_file_url_is_a_folder(tmp_path: Path) -> None:
    model = problems.make_model()
    expect_refusal(UsageError, "is a URL", Accelerator(cpu=True).save_model, model, "memory://weights")
    Accelerator(cpu=True).save_model(model, f"file://{tmp_path}/folder")
    assert problems.difference(load_file(tmp_path / "folder" / WEIGHTS), model.state_dict()) == 0


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
    with pytest.raises(ConfigError):
        parse_size(text)


def test_weights_are_not_written_where_others_are_read(tmp_path: Path) -> None:
    accelerator, model = Accelerator(cpu=True), problems.make_model()
    (tmp_path / "file").touch()
    expect_refusal(LockstepError, "is a file, but", accelerator.save_model, model, tmp_path / "file")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(LockstepError, match="Name another folder"):
        accelerator.save_model(model, tmp_path, safe_serialization=False)


def test_objects_are_saved_once_and_as_safetensors_if_asked(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    state = problems.make_model().state_dict()
    accelerator.save(state, tmp_path / "state.bin")
    accelerator.save(state, tmp_path / "state.safetensors", safe_serialization=True)
    assert problems.difference(torch.load(tmp_path / "state.bin"), state) == 0
    assert problems.difference(load_file(tmp_path / "state.safetensors"), state) == 0


class Rotary(torch.nn.Module):
    """Buffers whose memory has other signs than their values."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        for name, tensor in lazy_views(values).items():
            self.register_buffer(name, tensor)


def lazy_views(values: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"plain": values, "conjugate": values.conj(), "imaginary": values.conj().imag}


@pytest.mark.parametrize("way", ["save", "save_model", "save_state"])
def test_lazy_conjugates_and_negatives_are_written_as_they_read(tmp_path: Path, way: str) -> None:
    values = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    expected = {name: tensor.tolist() for name, tensor in lazy_views(values).items()}
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Rotary(values))
    if way == "save":
        accelerator.save(lazy_views(values), tmp_path / "state.safetensors", safe_serialization=True)
        found = load_file(tmp_path / "state.safetensors")
    elif way == "save_model":
        accelerator.save_model(model, tmp_path)
        found = load_file(tmp_path / "model.safetensors")
    else:
        accelerator.save_state(tmp_path / "state")
        other = Rotary(torch.zeros_like(values))
        Accelerator(cpu=True).prepare(other)
        Accelerator.latest().load_state(tmp_path / "state")
        found = dict(other.named_buffers())
    assert {name: found[name].tolist() for name in expected} == expected
