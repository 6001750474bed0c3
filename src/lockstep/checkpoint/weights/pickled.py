"""Weights as files that ``torch.save`` wrote, for readers that know no safetensors."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.weights.names import PICKLED_INDEX, PICKLED_WEIGHTS
from lockstep.errors import UsageError


def warn_of_pickles(method: str) -> None:
    warnings.warn(
        f"{method} got safe_serialization=False, so that weights are pickled. Files that others made should only be "
        "read by torch.load with weights_only=True. Leave it out to write safetensors.",
        stacklevel=3,
    )


def check_folder(directory: str) -> None:
    """Raise UsageError where weights lie that readers would take in place of the pickled ones."""
    others = sorted(path.name for path in Path(directory).glob("model*.safetensors*"))
    if others:
        raise UsageError(
            f"{directory} has {others[0]}, which is read in place of pickled weights. Name another folder."
        )


def write_pickled(
    state: Mapping[str, Any], directory: str, limit: int | None = None, name: str = PICKLED_WEIGHTS
) -> None:
    """Write ``pytorch_model.bin``, or numbered shards of at most ``limit`` bytes and an index. Files appear whole."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Any]] = [{}]
    room = limit
    for key, value in state.items():
        size = value.nbytes if isinstance(value, torch.Tensor) else 0
        if limit is not None and room is not None and size > room and shards[-1]:
            shards.append({})
            room = limit
        shards[-1][key] = value
        room = None if room is None else room - size
    stem = name.removesuffix(".bin")
    names = [f"{stem}-{number:05}-of-{len(shards):05}.bin" for number in range(1, len(shards) + 1)]
    names = [name] if len(shards) == 1 else names
    for old in folder.glob(f"{stem}-*-of-*.bin"):
        old.unlink()
    for one, shard in zip(names, shards, strict=True):
        partial = folder / f"{one}.partial"
        torch.save({key: _own(value) for key, value in shard.items()}, partial)
        os.replace(partial, folder / one)
    if len(shards) > 1:
        total = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
        where = {key: one for one, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / PICKLED_INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        (folder / name).unlink(missing_ok=True)
    else:
        (folder / PICKLED_INDEX).unlink(missing_ok=True)


def _own(value: Any) -> Any:
    """A tensor without the rest of a larger memory that it is a view of: that would be in the file as well."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
