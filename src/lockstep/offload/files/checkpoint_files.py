"""The tensors of a checkpoint of weights: a file, a folder, or the index of a folder.

Of a safetensors file the header is checked: nothing in it is believed that the file does not bear out. A file is 8
bytes that say how long the header is (little-endian), the header as JSON, then the tensors without gaps.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from math import prod

import torch

from lockstep.config.files import JsonObject, check_plain_file, check_shard, read_plain_file
from lockstep.config.values import repr_short
from lockstep.errors import CheckpointError, NoCheckpointError
from lockstep.model.dtypes import DTYPES, NAMES
from lockstep.offload.files.stored import FileRegion, PickledTensor, Stored

LARGEST_INDEX_BYTES = 128 << 20
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
"""What is taken from a folder, the first before the second; else its one ``*.index.json``."""


def stored_tensors(checkpoint: str | os.PathLike[str]) -> Mapping[str, Stored]:
    """Return the tensors of a checkpoint by name. Headers are read and checked, no values.

    Raises:
        CheckpointError: there is no checkpoint, or one of its files is missing or damaged.
    """
    path = os.fspath(checkpoint)
    if os.path.isfile(path):
        return _indexed(path) if path.endswith(".json") else _tensors_of(path)
    if not os.path.isdir(path):
        raise NoCheckpointError(
            f"{path} does not exist. Pass a file of weights, an index of shards, or a folder with either."
        )
    for name in SINGLE_FILES:
        if os.path.isfile(os.path.join(path, name)):
            return _tensors_of(os.path.join(path, name))
    indices = sorted(name for name in os.listdir(path) if name.endswith(".index.json"))
    # One of safetensors goes before one of pickles.
    if len(indices) > 1:
        safe = [name for name in indices if "safetensors" in name]
        indices = safe if len(safe) == 1 else indices
    if len(indices) == 1:
        return _indexed(os.path.join(path, indices[0]))
    alone = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    if not indices and len(alone) == 1:
        return _tensors_of(os.path.join(path, alone[0]))
    what = (
        f"several indices ({', '.join(indices)})"
        if indices
        else f"no index and none of {', '.join(SINGLE_FILES)}"
    )
    raise NoCheckpointError(f"The folder {path} has {what}. Pass the path of one file or index.")


def _indexed(index_path: str) -> Mapping[str, Stored]:
    """Return the tensors of all shards that an index names."""
    try:
        index = json.loads(read_plain_file(index_path, LARGEST_INDEX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"The index {index_path} cannot be read: {error}. Copy or download it again."
        ) from error
    places = index.get("weight_map", index) if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(
            f"The index {index_path} does not say which file each tensor is in. Copy or download it again."
        )
    folder = os.path.dirname(index_path)
    found: dict[str, Stored] = {}
    for file in sorted(set(places.values())):
        if os.path.basename(file) != file or file in ("", ".", ".."):
            raise CheckpointError(
                f"The index {index_path} names the file {repr_short(file)}, which is not in its folder. Move the "
                "files of weights into the folder of the index."
            )
        path = os.path.join(folder, file)
        try:
            check_shard(folder, file)
        except OSError as error:
            raise CheckpointError(
                f"{path} is missing, but {index_path} names it. Copy or download it again."
            ) from error
        for name, tensor in _tensors_of(path).items():
            if name in found:
                raise CheckpointError(
                    f"{repr_short(name)} is in several files of {index_path}. Copy or download them again."
                )
            found[name] = tensor
    absent = [name for name in places if name not in found]
    if absent:
        raise CheckpointError(
            f"{os.path.join(folder, places[absent[0]])} does not have {repr_short(absent[0])}, although "
            f"{index_path} says so. Copy or download it again."
        )
    return found


def _tensors_of(path: str) -> Mapping[str, Stored]:
    try:
        check_plain_file(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}. Check the path and permissions."
        ) from error
    if path.endswith(".safetensors"):
        return read_header(path)
    return _unpickled(path)


def _unpickled(path: str) -> Mapping[str, Stored]:
    """Return the tensors of a file of ``torch.save``, mapped where its format allows that."""
    is_mapped = True
    try:
        try:
            content: object = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            # Files from before torch 1.6 cannot be mapped.
            if "mmap can only be used" not in str(error):
                raise
            is_mapped = False
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).split("\n", 1)[0]
        raise CheckpointError(
            f"{path} cannot be read as weights: {reason} Copy or download it again."
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__} instead of tensors by name. Save model.state_dict() alone."
        )
    return {
        str(name): PickledTensor(path, tensor, is_mapped)
        for name, tensor in content.items()
        if isinstance(tensor, torch.Tensor)
    }


METADATA = "__metadata__"
# The limit of the format's own reader.
LONGEST_HEADER = 100_000_000


def read_header(path: str) -> dict[str, FileRegion]:
    """Return the tensors of a safetensors file by name.

    Raises:
        CheckpointError: it cannot be read, is shorter or longer than its header says, or the header is damaged.
    """
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            # Eight bytes: the length of the header behind them.
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            # A length that lies must not ask for more memory than the file has bytes.
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
        raise _damaged(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a mapping")
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
    """Return the first bytes of a file of these tensors, one after another."""
    header: dict[str, object] = {METADATA: {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Tensors that need it begin at a multiple of their element size.
    text += b" " * (-(len(text) + 8) % 64)
    return struct.pack("<Q", len(text)) + text


def _region(path: str, name: str, entry: JsonObject, begin: int) -> FileRegion:
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
    # Of those at one place the empty ones come first.
    for name, region in sorted(regions.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if region.offset != position:
            how = "overlap" if region.offset < position else "have a gap between them"
            raise _damaged(path, f"{before} and {repr_short(name)} {how}")
        position, before = region.offset + region.nbytes, repr_short(name)
    if position != size:
        raise _damaged(path, f"it has {size} bytes, but its header describes {position} bytes")


def _unique(path: str, pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _damaged(path, "its header names a tensor twice")
    return found


def _damaged(path: str, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {why}. Copy or download it again.")
