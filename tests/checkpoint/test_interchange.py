"""Weights taken out of checkpoints and folders: bit for bit, in bounded memory, or not at all."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from lockstep import Accelerator
from lockstep.checkpoint.format import ChunkMetadata, TensorEntry
from lockstep.checkpoint.weights import ChunkedTensors, open_weights, slabs, write_file, write_weights_folder
from lockstep.errors import CheckpointError, UsageError
from tests.marks import examples
from tests.patching import module_of
from tests.refusals import expect_refusal

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


def cut(draw: Any, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A grid of boxes that fill the shape."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size in shape:
        edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        parts = [(a, b - a) for a, b in pairwise(edges)] or [(0, 0)]
        boxes = [((*o, start), (*n, length)) for o, n in boxes for start, length in parts]
    return boxes


@given(st.data())
@examples(60)
def test_pieces_of_any_layout_are_read_as_one_tensor(tmp_path_factory: Any, data: st.DataObject) -> None:
    shape = data.draw(shapes)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
    whole = torch.arange(math.prod(shape)).view(shape).to(dtype)
    folder = tmp_path_factory.mktemp("pieces")
    pieces, files = [], {}
    for number, (offsets, lengths) in enumerate(cut(data.draw, shape)):
        part = whole
        for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
            part = part.narrow(dim, start, length)
        file, key = f"part-{number % 3}.safetensors", f"t@{number}"
        files.setdefault(file, {})[key] = part.contiguous()
        pieces.append(ChunkMetadata(file=file, key=key, offsets=offsets, shape=lengths))
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}
    entry = TensorEntry(dtype=names[dtype], shape=shape, pieces=pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_of(slabs), "SLAB_BYTES", data.draw(st.sampled_from([8, 40, 1 << 20])))
        read = b"".join(bytes(slab) for slab in ChunkedTensors(str(folder), {"t": entry}).elements("t"))
    assert read == whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class Tied(nn.Module):
    """Tied weights, a buffer of integers, a scalar, and rows that don't divide by two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.embed(tokens))) * self.scale


def save_two_models(directory: str, parallel: str) -> list[dict[str, torch.Tensor]]:
    accelerator = Accelerator(cpu=True, parallel=parallel)
    states, prepared = [], []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = Tied()
        states.append({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
        prepared.append(accelerator.prepare(model, torch.optim.AdamW(model.parameters())))
    accelerator.save_state(directory)
    accelerator.end_training()
    return states


def without_tie(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name != "out.weight"}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("parallel", ["ddp", "zero=3"])
def test_each_model_of_a_checkpoint_becomes_one_file(run_distributed, tmp_path: Path, parallel: str) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    states = run_distributed(save_two_models, 2, checkpoint, parallel)[0]
    for number, state in enumerate(states):
        weights = open_weights(checkpoint, number)
        assert weights.notes == ["out.weight is left out, as it is tied to embed.weight"]
        file = write_file(weights, str(tmp_path / f"{number}.safetensors"), replace=False)
        assert_same(load_file(file), without_tie(state))
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    expect_refusal(UsageError, "0, 1", open_weights, checkpoint, 2)
    tensors, elements = (
        [len(state) - 1 for state in states],
        [sum(tensor.numel() for tensor in without_tie(state).values()) for state in states],
    )
    listed = f"0 ({tensors[0]} tensors of {elements[0]:,} elements), 1 ({tensors[1]} tensors of {elements[1]:,} elem"
    expect_refusal(UsageError, listed, open_weights, checkpoint)


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Tied()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.save_state(tmp_path / "checkpoint")
    accelerator.end_training()
    return tmp_path / "checkpoint", state


def sharded_bert(folder: Path) -> Any:
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
    )
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def test_shards_that_transformers_wrote_become_one_file_and_shards_again(tmp_path: Path) -> None:
    model = sharded_bert(tmp_path / "sharded")
    file = write_file(open_weights(str(tmp_path / "sharded")), str(tmp_path / "whole"), replace=False)
    assert file == str(tmp_path / "whole" / "model.safetensors")
    files = write_weights_folder(
        open_weights(str(tmp_path / "whole")), str(tmp_path / "again"), 20_000, False
    )
    assert len(files) > 3
    state = model.state_dict()
    for folder in ("whole", "again"):
        loaded, info = transformers.BertForMaskedLM.from_pretrained(
            tmp_path / folder, output_loading_info=True
        )
        assert not info["missing_keys"]
        assert_same(loaded.state_dict(), state)


def test_a_conversion_rounds_as_torch_does_and_says_so_in_the_configuration(tmp_path: Path) -> None:
    model = sharded_bert(tmp_path / "sharded")
    source = open_weights(str(tmp_path / "sharded"), dtype=torch.bfloat16)
    write_weights_folder(source, str(tmp_path / "half"), 10**9, False)
    found = load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(tensor, model.state_dict()[name].bfloat16()) for name, tensor in found.items())
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path / "half")
    assert loaded.dtype == torch.bfloat16


def test_a_conversion_leaves_integers_and_eight_bits(tmp_path: Path) -> None:
    tensors = {
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "small": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "scale": torch.tensor([1.0, 2.0]).to(torch.float8_e8m0fnu),
        "double": torch.tensor([1 / 3, math.inf, math.nan, -0.0], dtype=torch.float64),
        "empty": torch.empty(0, 3),
    }
    save_file(tensors, tmp_path / "in.safetensors")
    file = write_file(
        open_weights(str(tmp_path / "in.safetensors"), dtype=torch.float32),
        str(tmp_path / "out.safetensors"),
        False,
    )
    found = load_file(file)
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "count": torch.int64,
        "mask": torch.bool,
        "small": torch.float8_e4m3fn,
        "scale": torch.float8_e8m0fnu,
        "double": torch.float32,
        "empty": torch.float32,
    }
    torch.testing.assert_close(found["double"], tensors["double"].float(), rtol=0, atol=0, equal_nan=True)
    assert found["empty"].shape == (0, 3)
    assert found["scale"].float().tolist() == [1.0, 2.0]


def test_values_that_are_smaller_than_a_byte_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "in.safetensors"
    save_file({"packed": torch.ones(2, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, path)
    expect_refusal(CheckpointError, "packed has the dtype F4", open_weights, str(path))


def test_a_number_that_the_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    save_file({"fine": torch.ones(2), "large": torch.tensor([1.0, -70000.0])}, tmp_path / "in.safetensors")
    source = open_weights(str(tmp_path / "in.safetensors"), dtype=torch.float16)
    with pytest.raises(CheckpointError, match="-70000.*F16"):
        write_file(source, str(tmp_path / "out.safetensors"), replace=False)
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


MERGED = """
import sys
from pathlib import Path
from lockstep.checkpoint.weights import open_weights, write_file, write_weights_folder
import torch

def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024

def merge(source, out):
    if sys.argv[3] == "merge":
        write_file(open_weights(source), out + ".safetensors", replace=False)
    else:
        write_weights_folder(open_weights(source, dtype=torch.float32), out, 10**12, False)

merge(sys.argv[1], sys.argv[2] + "warm")
before = peak()
merge(sys.argv[2], sys.argv[2] + "out")
print(peak() - before)
"""


@pytest.mark.parametrize("how", ["merge", "convert"])
def test_memory_stays_below_64_mib_however_large_the_model_is(tmp_path: Path, how: str) -> None:
    for name, rows in (("small", 1000), ("large", 16_000)):
        folder = tmp_path / name
        folder.mkdir()
        places = {}
        for number in range(3):
            file = f"model-{number + 1:05d}-of-00003.safetensors"
            save_file({f"t{number}": torch.full((rows, 1024), number, dtype=torch.bfloat16)}, folder / file)
            places[f"t{number}"] = file
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    size = sum(path.stat().st_size for path in (tmp_path / "large").glob("*.safetensors"))
    assert size > 90e6
    done = subprocess.run(
        [sys.executable, "-c", MERGED, str(tmp_path / "small"), str(tmp_path / "large"), how],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 << 20


def test_nothing_is_written_from_a_damaged_checkpoint(
    tmp_path: Path, checkpoint: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    directory, _ = checkpoint
    file = directory / "model-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model-00000\.safetensors.*embed\.weight"):
        open_weights(str(directory))


def test_a_checkpoint_is_never_written_into(
    tmp_path: Path, checkpoint: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    directory, _ = checkpoint
    before = sorted(directory.rglob("*"))
    weights = open_weights(str(directory))
    for out in (directory / "model.safetensors", directory, directory / "inner" / "out"):
        with pytest.raises(UsageError):
            write_file(weights, str(out), replace=True)
    assert sorted(directory.rglob("*")) == before


def test_existing_weights_are_replaced_only_on_demand(
    tmp_path: Path, checkpoint: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    directory, state = checkpoint
    weights = open_weights(str(directory))
    save_file({"other": torch.ones(1)}, tmp_path / "out.safetensors")
    save_file({"other": torch.ones(1)}, tmp_path / "model.safetensors")
    expect_refusal(
        UsageError, "--force", write_file, weights, str(tmp_path / "out.safetensors"), replace=False
    )
    expect_refusal(UsageError, "--force", write_weights_folder, weights, str(tmp_path), 100, replace=False)
    assert list(load_file(tmp_path / "out.safetensors")) == ["other"]
    write_file(weights, str(tmp_path / "out.safetensors"), replace=True)
    assert_same(load_file(tmp_path / "out.safetensors"), without_tie(state))
    write_weights_folder(weights, str(tmp_path), 100, replace=True)
    assert not (tmp_path / "model.safetensors").exists()


def test_what_is_no_folder_of_weights_is_refused_with_what_is_there(tmp_path: Path) -> None:
    def message(source: Any, **options: Any) -> str:
        with pytest.raises((UsageError, CheckpointError)) as caught:
            open_weights(str(source), **options)
        return str(caught.value)

    assert "does not exist" in message(tmp_path / "none")
    assert "is a URL" in message("memory://bucket")
    assert "nothing. Name a checkpoint" in message(tmp_path)
    (tmp_path / "checkpoint_3").mkdir()
    assert f"Name one of them, such as {tmp_path}/checkpoint_3" in message(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08")
    assert "model.safetensors cannot be read" in message(tmp_path / "model.safetensors")
    assert "no model 1. Leave --model out" in message(tmp_path / "model.safetensors", model=1)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../outside.safetensors"}}, "not a plain relative name"),
        ({"weight_map": {"a": "/etc/passwd"}}, "not a plain relative name"),
        ({"weight_map": {"a": "none.safetensors"}}, "none.safetensors"),
        ({"weight_map": {"a": "one.safetensors"}}, "has b in addition"),
        ({"weight_map": dict.fromkeys("abc", "one.safetensors")}, "lacks c"),
        ({"weight_map": {"a": 1}}, "has no 'weight_map'"),
        ([], "has no 'weight_map'"),
        ("{", "is no readable JSON"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path, index: Any, message: str) -> None:
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "one.safetensors")
    text = index if isinstance(index, str) else json.dumps(index)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    expect_refusal(CheckpointError, message, open_weights, str(tmp_path))
