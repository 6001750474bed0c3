"""Files of weights: found, read as safetensors' own reader does, and refused when damaged."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lockstep.errors import CheckpointError
from lockstep.model import DTYPES
from lockstep.offload.files import MappedFiles, file_mappings, is_in_file, read, stored_tensors
from tests.refusals import expect_refusal

TENSORS = {"a.w": torch.arange(12.0).view(3, 4), "b": torch.arange(5), "scalar": torch.tensor(2.5)}


def test_every_dtype_is_mapped_and_read_as_it_was_written(tmp_path: Path) -> None:
    file = str(tmp_path / "model.safetensors")
    tensors = {}
    for number, dtype in enumerate(set(DTYPES.values())):
        raw = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8)
        tensors[f"t{number}"] = raw.view(dtype).view(2, 3)
    tensors["empty"] = torch.empty(0, 3)
    tensors["scalar"] = torch.tensor(1.5)
    save_file(tensors, file)
    stored, files = stored_tensors(file), MappedFiles()
    assert stored.keys() == tensors.keys()
    for name, expected in tensors.items():
        for found in (stored[name].mapped(files), read(stored[name], files, expected.dtype)):
            assert found is not None and (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert found.view(-1).view(torch.uint8).equal(expected.view(-1).view(torch.uint8))
            assert found.untyped_storage().nbytes() == expected.nbytes


def test_what_is_written_to_a_mapped_tensor_does_not_reach_the_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(100_000)}, str(file))
    before = file.read_bytes()
    tensor = stored_tensors(file)["w"].mapped(MappedFiles())
    assert tensor is not None and is_in_file(tensor, file_mappings())
    tensor.add_(1)
    assert not is_in_file(tensor, file_mappings())  # a page of it is in memory alone
    assert file.read_bytes() == before
    assert not is_in_file(torch.zeros(100_000), file_mappings())


def test_every_form_of_a_checkpoint_is_found(tmp_path: Path) -> None:
    def values(path: Path) -> dict[str, list[Any]]:
        return {
            name: read(tensor, MappedFiles(), tensor.dtype).tolist()
            for name, tensor in stored_tensors(path).items()
        }

    expected = {name: tensor.tolist() for name, tensor in TENSORS.items()}
    save_file(TENSORS, str(tmp_path / "weights.safetensors"))
    assert values(tmp_path / "weights.safetensors") == values(tmp_path) == expected
    for legacy in (False, True):
        torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
        assert values(tmp_path / "pytorch_model.bin") == values(tmp_path) == expected
    save_file({"other": torch.ones(1)}, str(tmp_path / "model.safetensors"))
    assert list(values(tmp_path)) == ["other"]  # preferred, as it can be mapped
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    places = {}
    for number, (name, tensor) in enumerate(TENSORS.items()):
        places[name] = f"part-{number}.safetensors"
        save_file({name: tensor}, str(sharded / places[name]))
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert values(sharded) == values(index) == expected


def _header(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["b"]["data_offsets"].__setitem__(1, 10**15), "takes 40 bytes, but lies between"),
        (lambda h: h["b"].update(data_offsets=[10**15, 10**15 + 40]), "have a gap between them"),
        (lambda h: h["a.w"].update(data_offsets=h["b"]["data_offsets"], shape=[10]), "overlap"),
        (lambda h: h["b"].update(shape=[10**9]), "takes 8000000000 bytes"),
        (lambda h: h["b"].update(shape=[-5]), "the entry of 'b'"),
        (lambda h: h["b"].update(shape=[5.0]), "the entry of 'b'"),
        (lambda h: h["b"].update(dtype="I63"), "the entry of 'b'"),
        (lambda h: h["b"].pop("shape"), "the entry of 'b'"),
        (lambda h: h.update(b=[]), "the entry of 'b'"),
        (lambda h: h.pop("scalar"), "have a gap|its header describes"),
        (lambda h: h.update(__metadata__={"format": "tf"}), "saved for 'tf'"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, str(path))
    header, data = _header(path)
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    with pytest.raises(CheckpointError, match=message) as raised:
        stored_tensors(path)
    assert str(path) in str(raised.value)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, str(path))
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            stored_tensors(path)
    for wrong in (
        content + b"\0",
        b"\xff" * 200,
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b'{"a"',
    ):
        path.write_bytes(wrong)
        with pytest.raises(CheckpointError):
            stored_tensors(path)
    twice = b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}'
    path.write_bytes(struct.pack("<Q", len(twice)) + twice)
    expect_refusal(CheckpointError, "twice", stored_tensors, path)


def test_folders_and_indices_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            stored_tensors(path)

    refused(tmp_path / "absent", "does not exist")
    refused(tmp_path, "has no index and none of model.safetensors, pytorch_model.bin")
    index = tmp_path / "model.safetensors.index.json"
    save_file({"a": torch.ones(1)}, str(tmp_path / "one.safetensors"))
    for content, message in [
        ("{", "cannot be read"),
        ("[]", "does not say which file"),
        ('{"weight_map": {"a": 1}}', "does not say which file"),
        ('{"weight_map": {"a": "two.safetensors"}}', "two.safetensors is missing"),
        ('{"weight_map": {"a": "../one.safetensors"}}', "not in its folder"),
        ('{"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}', "does not have 'b'"),
    ]:
        index.write_text(content)
        refused(tmp_path, message)
    save_file({"a": torch.ones(1)}, str(tmp_path / "two.safetensors"))
    index.write_text('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}')
    refused(tmp_path, "'a' is in several files")
    (tmp_path / "weights.bin").write_bytes(b"no pickle")
    refused(tmp_path / "weights.bin", "cannot be read as weights")
    torch.save([1], tmp_path / "weights.bin")
    refused(tmp_path / "weights.bin", "holds a list")
