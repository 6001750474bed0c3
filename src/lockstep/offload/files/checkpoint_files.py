"""The tensors of a checkpoint of weights: a file, a folder, or the index of a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.config.files import check_plain_file, check_shard, read_plain_file
from lockstep.config.values import repr_short
from lockstep.errors import CheckpointError, NoCheckpointError
from lockstep.offload.files.safetensors_file import read_header
from lockstep.offload.files.stored import PickledTensor, Stored

LARGEST_INDEX_BYTES = 128 << 20
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
"""What is taken from a folder, the first before the second; else its one ``*.index.json``."""


def stored_tensors(checkpoint: str | os.PathLike[str]) -> Mapping[str, Stored]:
    """The tensors of a checkpoint by name. Headers are read and checked, no values.

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
    raise NoCheckpointError(
        f"The folder {path} has {what}. Pass the path of the file or index that is meant."
    )


def _indexed(index_path: str) -> Mapping[str, Stored]:
    """The tensors of all shards that an index names."""
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
                f"The index {index_path} names the file {repr_short(file)}, which is not in its folder. Move shards "
                "there."
            )
        path = os.path.join(folder, file)
        try:
            check_shard(folder, file)
        except OSError as error:
            raise CheckpointError(
                f"{path} is missing, which {index_path} names. Copy or download it again."
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
            f"{os.path.join(folder, places[absent[0]])} does not have {repr_short(absent[0])}, which {index_path} "
            "promises. Copy or download it again."
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
    """The tensors of a file of ``torch.save``, mapped where its format allows that."""
    is_mapped = True
    try:
        try:
            content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
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
