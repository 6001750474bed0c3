"""Recognise a checkpoint of another library by its names and content, and read it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable

import torch

from lockstep.checkpoint.weights import PICKLED_INDEX, PICKLED_WEIGHTS
from lockstep.compat.checkpoints.accelerate import is_accelerate, read_accelerate
from lockstep.compat.checkpoints.dcp import METADATA, read_dcp
from lockstep.compat.checkpoints.deepspeed import read_deepspeed, tag_folder
from lockstep.compat.checkpoints.ranks import has_shards, join_ranks
from lockstep.compat.checkpoints.reader import ForeignReader
from lockstep.compat.checkpoints.roles import is_weights, sort_entries
from lockstep.compat.checkpoints.source import CheckpointSource
from lockstep.compat.checkpoints.state import ImportedState
from lockstep.errors import CheckpointError

SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_single(reader: ForeignReader, name: str) -> ImportedState:
    """Return the weights, and whatever else a training script put beside them."""
    state = ImportedState("one pickled file")
    sort_entries(join_ranks(reader, [name], [reader.read(name)]), name, state)
    return state


def read_ranks(reader: ForeignReader, series: dict[str, list[str]]) -> ImportedState:
    """Return what the ranks of FSDP2 wrote, each to a file of its own: one series, or one of each part of the state.

    Raises:
        CheckpointError: a rank is missing, or nothing says how the files belong together.
    """
    names = [name for files in series.values() for name in files]
    values = dict(zip(names, reader.read_all(names), strict=True))
    if not has_shards(list(values.values())):
        raise CheckpointError(
            f"{reader.path(names[0])} and {len(names) - 1} more files have no DTensors, so nothing says how they "
            "belong together. Import one of them, or save whole tensors."
        )
    found = {
        re.split(r"[^a-z]", stem)[0]: join_ranks(reader, files, [values[name] for name in files])
        for stem, files in series.items()
    }
    state = ImportedState("files of FSDP2's ranks")
    sort_entries(found if len(found) > 1 else found.popitem()[1], f"{reader.source.path.name}/*", state)
    return state


def read_sharded(reader: ForeignReader) -> ImportedState:
    """Return the weights of ``pytorch_model-0000x-of-0000N.bin`` by ``pytorch_model.bin.index.json``.

    Raises:
        CheckpointError: the index names another file than such a one, or the files hold other tensors than it says.
    """
    places = _weight_map(reader)
    files = sorted(set(places.values()))
    model: dict[str, torch.Tensor] = {}
    for file, value in zip(files, reader.read_all(files), strict=True):
        expected = {name for name, place in places.items() if place == file}
        if not is_weights(value) or value.keys() != expected:
            count = len(value) if isinstance(value, dict) else 0
            raise reader.broken(
                file,
                f"{PICKLED_INDEX} says that it holds {len(expected)} tensors, but it holds {count} other tensors",
            )
        model.update(value)
    ordered = {name: model[name] for name in places}
    return ImportedState("weights in numbered files", [ordered], notes=[f"{file}: weights" for file in files])


def read_megatron(reader: ForeignReader) -> ImportedState:
    """Return the weights of Megatron's ``torch_dist`` under its own names, without what belongs to its ranks (0.16)."""
    weights = {
        name: value
        for name, value in read_dcp(reader, "", tensors_only=True).items()
        if not re.match(r"(chained_\d+\.)?optimizer\.", name)
    }
    state = ImportedState("Megatron's torch_dist")
    sort_entries(weights, reader.source.path.name, state)
    state.notes.append(
        "the names and the layout of layers, queries, keys and values are Megatron's; its optimizer, extra states and "
        "common.pt were left out. Megatron Bridge converts the weights for transformers"
    )
    return state


def _weight_map(reader: ForeignReader) -> dict[str, str]:
    try:
        places = json.loads(reader.source.text(PICKLED_INDEX))["weight_map"]
        well_formed = all(re.fullmatch(r"[\w.\-]+\.bin", place) for place in places.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        well_formed = False
    if not well_formed:
        raise reader.broken(PICKLED_INDEX, "it has no 'weight_map' from tensors to plain names of .bin files")
    return dict(places)


def read_foreign(src: str | os.PathLike[str], skip: Iterable[str] = ()) -> ImportedState:
    """Return the state in ``src``: a file of ``torch.save``, or a folder of Accelerate, FSDP, torch DCP or DeepSpeed.

    Pickles are interpreted in a separate process without rights, and never in this one. ``skip`` names files
    or folders in ``src`` to leave out.

    Raises:
        CheckpointError: it is of none of these forms, incomplete, damaged, or holds what is not allowed.
        UsageError: ``skip`` names something that is not there.
    """
    source = CheckpointSource(src, skip)
    reader = ForeignReader(source)
    if not source.is_folder:
        return read_single(reader, _pickled_file(source))
    # First, as such a folder may have a checkpoint of DeepSpeed or of DCP within it.
    if is_accelerate(source):
        return read_accelerate(reader)
    tag = tag_folder(reader)
    if tag is not None:
        state = read_deepspeed(reader, tag)
    elif METADATA in source and "metadata.json" in source:
        state = read_megatron(reader)
    elif METADATA in source:
        state = ImportedState("torch distributed checkpoint")
        sort_entries(read_dcp(reader, ""), source.path.name, state)
    elif PICKLED_INDEX in source:
        state = read_sharded(reader)
    elif PICKLED_WEIGHTS not in source and (series := _series(source)):
        state = read_ranks(reader, series)
    else:
        state = read_single(reader, _only_file(source))
    state.notes += [f"{name}: left out, because skip names it" for name in source.skipped]
    return state


def _pickled_file(source: CheckpointSource) -> str:
    name = source.path.name
    if name.endswith(".safetensors"):
        raise CheckpointError(
            f"{source.path} is a safetensors file already. Load it as it is, without converting."
        )
    if not name.endswith(SUFFIXES):
        raise CheckpointError(
            f"{source.path} does not end in {', '.join(SUFFIXES)}, as pickled checkpoints do. Rename it if it is "
            "a pickled checkpoint."
        )
    return name


def _series(source: CheckpointSource) -> dict[str, list[str]]:
    """Return the files whose names differ in their last number alone, such as ``rank-0.pt``, by what is before it."""
    found: dict[str, list[str]] = {}
    for (stem, _), name in source.matching(r"([^/]*?)(\d+)\.(?:bin|pt|pth|ckpt)").items():
        found.setdefault(stem, []).append(name)
    return {stem: files for stem, files in found.items() if len(files) > 1}


def _only_file(source: CheckpointSource) -> str:
    """Return the one pickled file of a folder, such as ``pytorch_model.bin`` beside a configuration."""
    files = [name for name in source.below("") if name.endswith(SUFFIXES)]
    if PICKLED_WEIGHTS in files:
        return PICKLED_WEIGHTS
    if not files and any(name.endswith(".safetensors") for name in source.names):
        raise CheckpointError(
            f"{source.path} has safetensors files, which need no import. Join them with `lockstep checkpoint convert`."
        )
    if len(files) != 1:
        seen = (", ".join(source.names[:8]) or "nothing") + (" and more" if len(source.names) > 8 else "")
        raise CheckpointError(
            f"{source.path} is not a checkpoint of a known kind: it has {seen}. Known are folders of Accelerate, "
            "the Trainer, FSDP, torch.distributed.checkpoint and DeepSpeed, and single pickled files."
        )
    return files[0]
