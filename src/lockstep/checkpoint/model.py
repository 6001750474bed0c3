"""Model weights as safetensors files, one or many with an index, as transformers reads them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_file
from torch import nn

from lockstep.comm.dtensor import is_dtensor, local, shard_like
from lockstep.errors import CheckpointError, ConfigError, UsageError
from lockstep.runtime import process

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What scripts import for files that others wrote.
PICKLED_WEIGHTS = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def refuse_pickle(method: str, safe_serialization: bool) -> None:
    """Raise UsageError for ``safe_serialization=False``."""
    if not safe_serialization:
        raise UsageError(
            f"{method} got safe_serialization=False, but weights are written as safetensors only, which no pickle can "
            "hide in. Drop the argument, or save accelerator.get_state_dict(model) yourself."
        )


def save_object(value: Any, file: Any, safe_serialization: bool) -> None:
    """``safetensors.torch.save_file`` for a dict of tensors, or ``torch.save`` for any object."""
    if safe_serialization:
        save_file(_without_ties(value), file, metadata={"format": "pt"})
    else:
        torch.save(value, file)


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """``save_object`` on rank 0, or on local rank 0 of each machine; nothing on the others."""
    runtime = process.start()
    if runtime.is_local_main if save_on_each_node else runtime.is_main:
        save_object(obj, f, safe_serialization)


def write_weights(
    state_dict: Mapping[str, torch.Tensor],
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
) -> None:
    """Write ``model.safetensors``, or numbered shards of at most ``max_shard_size`` bytes with an index.

    Tensors that share memory (tied weights) are written once, under their first name; files of an
    earlier save are removed.

    Raises:
        ConfigError: ``max_shard_size`` is not a number of bytes or a text such as ``"500MB"``.
    """
    directory = Path(save_directory)
    shards = _shards(_without_ties(state_dict), parse_size(max_shard_size))
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("model*.safetensors"):
        if re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", old.name):
            old.unlink()
    (directory / INDEX).unlink(missing_ok=True)
    if len(shards) == 1:
        save_file(shards[0], directory / WEIGHTS, metadata={"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_weights(model: nn.Module, directory: Path, name: str = WEIGHTS) -> None:
    """Load what ``write_weights`` or ``save_file`` wrote into ``model``, tied weights included.

    Raises:
        CheckpointError: the file has other names or shapes than the model.
    """
    path = directory / name
    with _misfits_named(model, path):
        places = model.state_dict()  # of a sharded model, it lets gathered parameters go
        if any(is_dtensor(place) for place in places.values()):
            _load_shards(places, path)
        else:
            load_model(model, path)


def check_weights(model: nn.Module, directory: Path, name: str = WEIGHTS) -> None:
    """Raise CheckpointError where ``read_weights`` would; nothing is changed."""
    path = directory / name
    with _misfits_named(model, path):
        places = model.state_dict()
        ties = _ties(places)
        with safe_open(str(path), framework="pt") as file:
            given = set(file.keys())
            absent = sorted(name for name in places.keys() - given if not given & ties[name])
            unknown = sorted(given - places.keys())
            if absent or unknown:
                raise RuntimeError(
                    f"tensors {absent[:3]} are missing from it, and {unknown[:3]} are not in the model."
                )
            for name in sorted(given):
                shape = tuple(file.get_slice(name).get_shape())
                if shape != places[name].shape:
                    raise RuntimeError(f"{name} is {shape}, but {tuple(places[name].shape)} in the model.")


@contextmanager
def _misfits_named(model: nn.Module, path: Path) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} does not fit {type(model).__name__}: {error} Load it into the model that it was saved from."
        ) from error


@torch.no_grad()
def _load_shards(places: dict[str, torch.Tensor], path: Path) -> None:
    """``load_model`` for a sharded model: one whole tensor at a time is in memory."""
    with safe_open(str(path), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  (not a mapping)
            place = places[name]
            local(place).copy_(local(shard_like(file.get_tensor(name), place)))


def _ties(places: dict[str, torch.Tensor]) -> dict[str, set[str]]:
    """For each name, all names of tensors at the same place."""
    names: dict[Any, set[str]] = {}
    for name, tensor in places.items():
        part = local(tensor)
        place = (
            part.untyped_storage()._cdata,
            part.storage_offset(),
            tensor.shape,
            part.stride(),
            part.dtype,
        )
        names.setdefault(place, set()).add(name)
    return {name: tied for tied in names.values() for name in tied}


def parse_size(size: int | str) -> int:
    """Bytes of ``size``: a positive integer, or a text such as ``"10GB"`` or ``"512MiB"``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", str(size).upper())
    factor = _UNITS.get(match[2]) if match else None
    number = int(float(match[1]) * factor) if match and factor else 0
    if number < 1:
        raise ConfigError(
            f"max_shard_size={size!r} is not a size. Pass a number of bytes or a text such as '10GB' or '512MiB'."
        )
    return number


def _without_ties(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    seen: dict[Any, str] = {}
    kept = {}
    for name, tensor in state_dict.items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in seen:
            continue
        seen[place] = name
        tensor = tensor.detach().cpu().contiguous()
        is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
        kept[name] = tensor.clone() if is_view else tensor
    return kept


def _shards(tensors: dict[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards
