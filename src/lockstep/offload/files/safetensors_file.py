"""The header of a safetensors file, checked: nothing in it is believed that the file does not bear out.

A file is 8 bytes that say how long the header is (little-endian), the header as JSON, then the tensors without gaps.
"""

from __future__ import annotations

import json
import os
import struct
from math import prod
from typing import Any

import torch

from lockstep.config.values import repr_short
from lockstep.errors import CheckpointError
from lockstep.offload.files.stored import FileRegion

METADATA = "__metadata__"
LONGEST_HEADER = 100_000_000  # the limit of the format's own reader

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_header(path: str) -> dict[str, FileRegion]:
    """The tensors of a safetensors file by name.

    Raises:
        CheckpointError: it cannot be read, is shorter or longer than its header says, or the header is damaged.
    """
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(LONGEST_HEADER, size - 8):
                raise _damaged(path, f"it has {size} bytes, its header would take {length}")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}. Check the path and permissions."
        ) from error
    try:
        header = json.loads(text, object_pairs_hook=lambda pairs: _unique(path, pairs))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is no JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no mapping")
    metadata = header.pop(METADATA, None)
    if isinstance(metadata, dict) and metadata.get("format", "pt") != "pt":
        raise CheckpointError(
            f"{path} was saved for {repr_short(metadata['format'])}, not for PyTorch. Convert it with transformers "
            "first."
        )
    begin = 8 + length
    regions = {name: _region(path, name, entry, begin) for name, entry in header.items()}
    _check_layout(path, regions, begin, size)
    return regions


def header_bytes(tensors: dict[str, tuple[torch.dtype, torch.Size]]) -> bytes:
    """The first bytes of a file of these tensors, one after another."""
    header: dict[str, object] = {METADATA: {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)  # tensors that need it begin at a multiple of their element size
    return struct.pack("<Q", len(text)) + text


def _region(path: str, name: str, entry: Any, begin: int) -> FileRegion:
    try:
        dtype, shape, (start, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, end]
    except (KeyError, TypeError, ValueError):
        raise _damaged(path, f"the entry of {repr_short(name)} is {repr_short(entry, 80)}") from None
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise _damaged(path, f"the entry of {repr_short(name)} is {repr_short(entry, 80)}")
    region = FileRegion(path, begin + start, dtype, torch.Size(shape))
    if region.nbytes != end - start:
        raise _damaged(
            path, f"{repr_short(name)} takes {region.nbytes} bytes, but lies between {start} and {end}"
        )
    return region


def _check_layout(path: str, regions: dict[str, FileRegion], begin: int, size: int) -> None:
    position, before = begin, "the header"
    for name, region in sorted(regions.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if region.offset != position:
            how = "overlap" if region.offset < position else "have a gap between them"
            raise _damaged(path, f"{before} and {repr_short(name)} {how}")
        position, before = region.offset + region.nbytes, repr_short(name)
    if position != size:
        raise _damaged(path, f"it has {size} bytes, but by its header {position}")


def _unique(path: str, pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _damaged(path, "its header names a tensor twice")
    return found


def _damaged(path: str, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {why}. Copy or download it again.")
