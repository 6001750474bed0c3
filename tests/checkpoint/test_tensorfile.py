"""Files of tensors, held against the safetensors library in both directions."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lockstep.checkpoint.format import TensorFile, TensorReader
from lockstep.errors import CheckpointError, UsageError
from tests.refusals import expect_refusal

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.float16,
    torch.bfloat16,
    torch.uint32,
    torch.int32,
    torch.float32,
    torch.uint64,
    torch.int64,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


def random_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Elements with random bits, of which every pattern is a value."""
    generator = torch.Generator().manual_seed(len(shape))
    count = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        bits = bits % 2
    return bits.view(dtype).view(shape)


def examples() -> dict[str, torch.Tensor]:
    found = {str(dtype): random_of(dtype, 3, 5) for dtype in DTYPES}
    found |= {f"scalar {dtype}": random_of(dtype, 1)[0] for dtype in DTYPES}
    found |= {f"empty {dtype}": random_of(dtype, 0, 4) for dtype in DTYPES}
    wide = random_of(torch.float32, 6, 8)
    return found | {
        "transposed": wide.t(),
        "every second": wide[::2, 1::3],
        "expanded": wide[:1].expand(4, 8),
        "conjugated": random_of(torch.complex64, 3, 2).conj(),
        "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(wide.clone()),
        'ünicode "name" \n': torch.arange(3),
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes, whatever the strides; NaNs count by their bits."""
    a, b = (t.detach().resolve_conj().resolve_neg().contiguous() for t in (a, b))
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def content_of(file: TensorFile) -> bytes:
    return b"".join(bytes(chunk) for chunk in file.chunks())


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    tensors = examples()
    path = tmp_path / "ours.safetensors"
    path.write_bytes(content_of(TensorFile(tensors)))
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bits(found[name], tensor), name
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_file_of_few_or_no_tensors_can_be_read(tmp_path: Path, count: int) -> None:
    tensors = {str(i): torch.full((i,), i) for i in range(count)}
    path = tmp_path / "ours.safetensors"
    path.write_bytes(content_of(TensorFile(tensors)))
    assert {name: t.tolist() for name, t in load_file(path).items()} == {
        name: t.tolist() for name, t in tensors.items()
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_header_and_bytes_are_those_of_the_library(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": random_of(dtype, 5, 3), "b": random_of(dtype, 2), "c": random_of(dtype, 1)[0]}
    path = tmp_path / "theirs.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    assert content_of(TensorFile(tensors)) == path.read_bytes()


def test_our_reader_reads_the_library_s_files_whole_and_in_slices(tmp_path: Path) -> None:
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in examples().items()}
    path = tmp_path / "theirs.safetensors"
    save_file(tensors, path)
    reader = TensorReader(str(path))
    for name, tensor in tensors.items():
        assert same_bits(reader.read(name, [0] * tensor.ndim, tensor.shape), tensor), name
    for name in map(str, DTYPES):
        assert same_bits(reader.read(name, (1, 2), (2, 2)), tensors[name][1:3, 2:4]), name
        assert same_bits(reader.read(name, (0, 0), (1, 5)), tensors[name][:1]), name


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, dtype=torch.complex128),
        torch.eye(2).to_sparse(),
        torch.ones(2, dtype=torch.complex32),
    ],
    ids=["complex128", "sparse", "complex32"],
)
def test_a_tensor_that_such_files_cannot_hold_is_refused_by_name(tensor: torch.Tensor) -> None:
    expect_refusal(UsageError, "a.b", content_of, TensorFile({"a.b": tensor}))


def with_header(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
BROKEN = {
    "empty": b"",
    "short": b"\x08\0\0",
    "huge header": struct.pack("<Q", 1 << 62) + b"{}",
    "header beyond the end": struct.pack("<Q", 100) + b"{}",
    "no JSON": with_header(b"{not json"),
    "no object": with_header([1]),
    "no data": with_header({"a": ONE}),
    "too much data": with_header({"a": ONE}, b"12345"),
    "hole": with_header({"a": ONE, "b": {**ONE, "data_offsets": [8, 12]}}, bytes(12)),
    "overlap": with_header({"a": ONE, "b": {**ONE, "data_offsets": [2, 6]}}, bytes(6)),
    "negative": with_header({"a": {**ONE, "data_offsets": [-4, 0]}}),
    "overflow": with_header({"a": {**ONE, "shape": [1 << 62, 1 << 62]}}, bytes(4)),
    "unknown dtype": with_header({"a": {**ONE, "dtype": "F33"}}, bytes(4)),
    "pickle": b"\x80\x04\x95\x0b\0\0\0\0\0\0\0}\x94\x8c\x01a\x94K\x01s.",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_an_error_of_the_checkpoint(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(BROKEN[kind])
    expect_refusal(
        CheckpointError, "broken.safetensors", lambda: TensorReader(str(path)).read("a", (0,), (1,))
    )


def test_what_is_not_in_a_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    save_file({"a": torch.arange(6).view(2, 3), "s": torch.tensor(1)}, path)
    reader = TensorReader(str(path))
    expect_refusal(CheckpointError, "some.safetensors: b", reader.read, "b", (0,), (1,))
    expect_refusal(CheckpointError, "some.safetensors: a", reader.read, "a", (0, 0, 0), (1, 1, 1))
    expect_refusal(
        CheckpointError, "missing.safetensors", TensorReader, str(tmp_path / "missing.safetensors")
    )
