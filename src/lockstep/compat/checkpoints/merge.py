"""Sharded weights of another library, or of ours, joined into one file."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file

from lockstep.checkpoint.weights import PICKLED_WEIGHTS, WEIGHTS
from lockstep.checkpoint.weights.convert import open_weights, write_file
from lockstep.checkpoint.weights.model import save_object
from lockstep.compat.checkpoints.convert import read_foreign
from lockstep.compat.checkpoints.dcp import METADATA
from lockstep.errors import ConfigError


def merge_weights(source: Path, output: Path, safe: bool = True, remove: bool = False) -> Path:
    """Write the weights in the folder ``source`` to one file in the folder ``output``, and return its path.

    ``safe``: as safetensors, else as a pickle. ``remove`` the source afterwards.

    Raises:
        ConfigError: the folders with weights are in ``source``, or ``output`` is in what is to be removed.
        CheckpointError: there are no weights, or they are damaged.
    """
    source, output = source.expanduser(), output.expanduser()
    if remove and output.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"{output} is in {source}, which is to be removed. Name another folder.")
    # Copies: tied weights keep all of their names.
    copies = {name: value.clone() for name, value in _joined(source).items()}
    output.mkdir(parents=True, exist_ok=True)
    path = output / (WEIGHTS if safe else PICKLED_WEIGHTS)
    save_object(copies, path, safe)
    if remove:
        shutil.rmtree(source)
    return path


def _joined(source: Path) -> dict[str, torch.Tensor]:
    if (source / METADATA).is_file():
        return read_foreign(source).models[0]
    inner = sorted(path.parent.name for path in source.glob(f"*/{METADATA}"))
    if inner:
        raise ConfigError(
            f"{source} is not a folder of sharded weights, but has {', '.join(inner[:3])}. Name one of them."
        )
    with TemporaryDirectory() as aside:
        write_file(open_weights(str(source)), f"{aside}/{WEIGHTS}", True)
        return load_file(f"{aside}/{WEIGHTS}")
