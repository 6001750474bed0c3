"""Weights of checkpoints and of folders of safetensors files, written anew: as one file, in shards, in another dtype.

Memory stays bounded whatever the size of the model: see ``slabs``.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError, safe_open

from lockstep.checkpoint import folders
from lockstep.checkpoint.format.documents import (
    LARGEST_JSON_BYTES,
    MANIFEST,
    Chunk,
    check_name,
    checked,
    parse_json,
)
from lockstep.checkpoint.format.tensors import (
    ChunkMetadata,
    Index,
    TensorEntry,
    check_chunks,
    check_key,
)
from lockstep.checkpoint.reader import Checkpoint
from lockstep.checkpoint.store.local import LocalStore, sync
from lockstep.checkpoint.store.verify import verify_checkpoint
from lockstep.checkpoint.weights import INDEX, WEIGHTS
from lockstep.checkpoint.weights.folder import (
    CONFIGURATIONS,
    PARTIAL,
    local_directory,
    remove_quietly,
    write_folder,
)
from lockstep.checkpoint.weights.streams import ChunkedTensors, check_room, write_tensor_file
from lockstep.config.files import check_plain_file, check_shard, read_plain_file
from lockstep.config.values import join_names
from lockstep.errors import CheckpointError, UsageError
from lockstep.model.dtypes import DTYPES

LARGEST_CONFIGURATION_BYTES = 64 << 20
MOST_SHOWN = 20
# Chunks of one rank, as torch's HuggingFaceStorageWriter writes them.
_SHARD_OF_RANK = r"shard-(\d+)-model-\d+-of-\d+\.safetensors"
ByteProgress = Callable[[int], object]
"""Is told of bytes that were read or written."""


@dataclass(frozen=True)
class Weights:
    """One model's weights in files: checked, and not read yet."""

    tensors: ChunkedTensors
    documents: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as they will be written."""
        return sum(tensor.nbytes for tensor in self.tensors.described.values())


def open_weights(
    source: str,
    model: int | None = None,
    dtype: torch.dtype | None = None,
    seen: ByteProgress = lambda count: None,
) -> Weights:
    """Return the weights in ``source``: those of a folder as transformers reads it, or of one file, or of a
    checkpoint, which is verified as a whole. Of several models in it ``model`` is the number of the one.

    Raises:
        CheckpointError: something is damaged or missing; names it.
        UsageError: ``source`` is none of these, has no such model, or has several and none is chosen.
    """
    if "://" in source and not source.startswith("file://"):
        raise UsageError(
            f"{source} is a URL, but weights are read from local files. Copy it to a folder first."
        )
    path = os.path.normpath(os.path.expanduser(source.removeprefix("file://")))
    if os.path.lexists(f"{path}/{MANIFEST}"):
        return _of_checkpoint(path, model, dtype, seen)
    if model is not None:
        raise UsageError(f"{path} is no checkpoint, so it has no model {model}. Leave --model out.")
    if os.path.isfile(path):
        return Weights(ChunkedTensors(os.path.dirname(path) or ".", _of_files(path), dtype))
    return _of_folder(path, dtype)


def _of_checkpoint(
    directory: str, number: int | None, dtype: torch.dtype | None, seen: ByteProgress
) -> Weights:
    checkpoint = Checkpoint(directory, verify_checkpoint(LocalStore(), directory, seen=seen))
    models = checkpoint.state().get("models", {})
    if number is None:
        number = _only_one(directory, _in_order(models), checkpoint.index)
    if str(number) not in models:
        there = ", ".join(_in_order(models)) or "none"
        raise UsageError(f"{directory} holds no weights of model {number}. Name one of its models: {there}.")
    prefix = f"model.{number}."
    index = {
        name.removeprefix(prefix): entry
        for name, entry in checkpoint.index.items()
        if name.startswith(prefix)
    }
    for name in index:
        check_key(name)
    notes = [
        f"{name} is left out, as it is tied to {first}" for name, first in models[str(number)]["ties"].items()
    ]
    notes += [f"{name} is left out, as it is no tensor" for name in models[str(number)]["extra"]]
    return Weights(ChunkedTensors(checkpoint.root, index, dtype), notes=notes)


def _in_order(models: Iterable[str]) -> list[str]:
    # Numbers as text: 10 comes behind 9.
    return sorted(models, key=lambda number: (len(number), number))


def _only_one(directory: str, numbers: list[str], index: Index) -> int:
    """Return the number of the model in a checkpoint that has one."""
    if len(numbers) == 1:
        return int(numbers[0])
    if not numbers:
        raise UsageError(f"{directory} holds no models. Name a checkpoint of a run that prepared one.")
    sizes = [
        [math.prod(entry.shape) for name, entry in index.items() if name.startswith(f"model.{number}.")]
        for number in numbers
    ]
    described = [
        f"{number} ({len(elements)} tensors of {sum(elements):,} elements)"
        for number, elements in zip(numbers, sizes, strict=True)
    ]
    raise UsageError(
        f"{directory} holds {len(numbers)} models, in the order in which they were prepared: "
        f"{join_names(described, MOST_SHOWN)}. Choose one, as with --model {numbers[-1]}."
    )


def _of_folder(folder: str, dtype: torch.dtype | None) -> Weights:
    """Return what transformers would take: ``model.safetensors`` first, then an index; else the only such
    file there.
    """
    store = LocalStore()
    if not os.path.isdir(folder):
        if os.path.exists(folder):
            check_plain_file(folder)
        raise UsageError(
            f"{folder} does not exist. Name a checkpoint, a folder of weights or a safetensors file."
        )
    numbered = folders.numbers(folder, store)
    if numbered:
        raise UsageError(
            f"{folder} has {len(numbered)} checkpoints. Name one of them, such as {folder}/checkpoint_{numbered[-1]}."
        )
    names = sorted(os.listdir(folder))
    indices = [name for name in names if name.endswith(".safetensors.index.json")]
    files = [name for name in names if name.endswith(".safetensors")]
    shards = [name for name in files if re.fullmatch(_SHARD_OF_RANK, name)]
    notes = [
        f"The weights are joined from {len(shards)} files. Their writer does not record how many ranks there were, "
        "so see to it that no file is missing."
    ]
    if shards:
        index = _of_shards(folder, shards)
    elif WEIGHTS not in files and (INDEX in indices or len(indices) == 1):
        index = _of_index(folder, INDEX if INDEX in indices else indices[0])
    elif WEIGHTS in files or len(files) == 1:
        index = _of_files(f"{folder}/{WEIGHTS if WEIGHTS in files else files[0]}")
    else:
        raise UsageError(
            f"{folder} has neither {MANIFEST} nor {WEIGHTS} nor {INDEX}, but "
            f"{', '.join(names[:5]) or 'nothing'}. Name a checkpoint, a folder of weights or a safetensors file."
        )
    return Weights(ChunkedTensors(folder, index, dtype), _documents(folder, dtype), notes if shards else [])


def _of_index(folder: str, name: str) -> Index:
    path = f"{folder}/{name}"
    try:
        document = parse_json(read_plain_file(path, LARGEST_JSON_BYTES), path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Copy it again.") from error
    places = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f"{path} has no 'weight_map' from tensors to files. Copy it again.")
    found: Index = {}
    for file in sorted(set(places.values())):
        try:
            check_shard(folder, check_name(file))
        except OSError as error:
            raise CheckpointError(
                f"{folder}/{file} is named in {name}, but cannot be read: {error}. Copy it again."
            ) from error
        there = _of_files(f"{folder}/{file}", file)
        named = {tensor for tensor, other in places.items() if other == file}
        if named != there.keys():
            _refuse_overwritten(folder, [file])
            lacks = join_names(sorted(named - there.keys()), none="nothing")
            has = join_names(sorted(there.keys() - named), none="nothing")
            raise CheckpointError(
                f"{folder}/{file} does not match {name}: it lacks {lacks}, and has {has} in addition. Copy both again."
            )
        found.update(there)
    about = document.get("metadata") if isinstance(document, dict) else None
    total = about.get("total_size") if isinstance(about, dict) else None
    # Other writers count otherwise.
    if isinstance(total, int) and total > sum(entry.nbytes for entry in found.values()):
        _refuse_overwritten(folder, set(places.values()))
    return found


def _refuse_overwritten(folder: str, files: Iterable[str]) -> None:
    """Raise CheckpointError for files of torch's distributed checkpoint, which several ranks wrote to one name."""
    if any(_saved_offsets(f"{folder}/{file}") for file in files):
        raise CheckpointError(
            f"{folder} has one rank's part of each weight: HuggingFaceStorageWriter let all ranks write the same "
            "file. Save again with save_distributed=True, and convert that."
        )


def _of_shards(folder: str, files: list[str]) -> Index:
    """Return the tensors whose chunks ranks wrote to files of their own. Raises CheckpointError if one is missing."""
    found: Index = {}
    for path in (f"{folder}/{file}" for file in files):
        offsets = _saved_offsets(path)
        for key, entry in _of_files(path).items():
            placed = {**entry.pieces[0].model_dump(), "offsets": offsets.get(key)}
            chunk = checked(ChunkMetadata, placed, path)
            before = found.setdefault(key, TensorEntry(dtype=entry.dtype, shape=chunk.shape, pieces=[]))
            if entry.dtype != before.dtype:
                raise CheckpointError(
                    f"{path} has {key} as {entry.dtype}, not {before.dtype}. Copy it again."
                )
            ends = zip(before.shape, chunk.offsets, chunk.shape, strict=False)
            shape = tuple(max(old, offset + size) for old, offset, size in ends)
            found[key] = TensorEntry(dtype=before.dtype, shape=shape, pieces=[*before.pieces, chunk])
    for key, entry in found.items():
        check_chunks(key, entry, folder)
    return found


def _saved_offsets(path: str) -> dict[str, object]:
    """Return where the tensors of a file begin in whole ones, if torch's distributed checkpoint wrote it."""
    check_plain_file(path)
    with safe_open(path, framework="pt") as opened:
        said = (opened.metadata() or {}).get("DCP_SHARDING_INFO", "{}")
    about = parse_json(said.encode(), path)
    named = about.items() if isinstance(about, dict) else ()
    return {name: entry.get("saved_offsets") for name, entry in named if isinstance(entry, dict)}


def _of_files(path: str, file: str | None = None) -> Index:
    """Return the tensors of one safetensors file, each a chunk of its own; the library checks header and
    size.
    """
    found: Index = {}
    try:
        check_plain_file(path)
        with safe_open(path, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118  (not a mapping)
                stored = opened.get_slice(key)
                dtype, shape = str(stored.get_dtype()), tuple(stored.get_shape())
                if dtype not in DTYPES:
                    raise CheckpointError(
                        f"{path}: {key} has the dtype {dtype}, whose values are smaller than a byte, which "
                        "cannot be converted. Use the file as it is."
                    )
                own = ChunkMetadata(
                    file=file or os.path.basename(path), key=key, offsets=(0,) * len(shape), shape=shape
                )
                found[key] = TensorEntry(dtype=dtype, shape=shape, pieces=[own])
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Copy it again.") from error
    return found


def _documents(folder: str, dtype: torch.dtype | None) -> dict[str, bytes]:
    """Return the configurations beside weights, with the dtype that these will have."""
    found = {}
    for name in CONFIGURATIONS:
        path = f"{folder}/{name}"
        if os.path.lexists(path):
            found[name] = read_plain_file(path, LARGEST_CONFIGURATION_BYTES)
    if dtype is not None and CONFIGURATIONS[0] in found:
        config = parse_json(found[CONFIGURATIONS[0]], f"{folder}/{CONFIGURATIONS[0]}")
        if isinstance(config, dict):
            # The key that is there: transformers has renamed it from torch_dtype to dtype.
            key = "torch_dtype" if "torch_dtype" in config else "dtype"
            config[key] = str(dtype).removeprefix("torch.")
            found[CONFIGURATIONS[0]] = json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"
    return found


def write_file(weights: Weights, path: str, replace: bool, seen: ByteProgress = lambda count: None) -> str:
    """Write weights as one safetensors file; ``path`` is its name, or a folder for ``model.safetensors``.

    It appears when it is complete. Returns where it is.

    Raises:
        UsageError: it exists and is not to be replaced.
        CheckpointError: it could not be written; what was there before still is.
    """
    path = os.path.normpath(os.path.expanduser(path))
    if not path.endswith(".safetensors"):
        write_weights_folder(weights, path, None, replace, seen)
        return f"{path}/{WEIGHTS}"
    folder = os.path.dirname(path) or "."
    _refuse_checkpoint(folder)
    if os.path.isdir(path) or (os.path.lexists(path) and not replace):
        raise UsageError(f"{path} exists and was left as it is. Use --force, or name another file.")
    partial = f"{path}{PARTIAL}"
    try:
        os.makedirs(folder, exist_ok=True)
        check_room(folder, weights.nbytes)
        remove_quietly(partial)
        write_tensor_file(partial, weights.tensors.described, _counting_chunks(weights, seen))
        os.rename(partial, path)
        # A rename lasts once its folder is on the disk.
        sync(folder)
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written: {error}. Make room there or mend its permissions, or write elsewhere."
        ) from error
    finally:
        remove_quietly(partial)
    return path


def write_weights_folder(
    weights: Weights,
    directory: str,
    limit: int | None,
    replace: bool,
    seen: ByteProgress = lambda count: None,
) -> list[str]:
    """Write weights as ``save_model`` does, in files of at most ``limit`` bytes. Returns the names of files.

    Raises:
        UsageError: there are weights already, which are not to be replaced, or a checkpoint.
        CheckpointError: a file could not be written; what was there before still is.
    """
    directory = local_directory(directory)
    _refuse_checkpoint(directory)
    if not replace and any(os.path.lexists(f"{directory}/{name}") for name in (WEIGHTS, INDEX)):
        raise UsageError(
            f"{directory} has weights, which were left as they are. Use --force, or name another folder."
        )
    tensors = weights.tensors.described
    write_folder(
        directory, tensors, _counting_chunks(weights, seen), limit or weights.nbytes + 1, weights.documents
    )
    written = re.compile(r"model.*\.safetensors(\.index\.json)?")
    return sorted(
        name for name in os.listdir(directory) if written.fullmatch(name) or name in weights.documents
    )


def _refuse_checkpoint(folder: str) -> None:
    """Raise UsageError for a folder in or below a checkpoint, which is never changed."""
    # By the real path, as a link may lead into a checkpoint.
    at = os.path.realpath(folder)
    while True:
        if os.path.isfile(os.path.join(at, MANIFEST)):
            raise UsageError(
                f"{folder} is in the checkpoint {at}, and writing there would damage it. Name another folder."
            )
        if at == os.path.dirname(at):
            return
        at = os.path.dirname(at)


def _counting_chunks(weights: Weights, seen: ByteProgress) -> Callable[[str], Iterable[Chunk]]:
    def elements(name: str) -> Iterable[Chunk]:
        for chunk in weights.tensors.elements(name):
            yield chunk
            seen(len(chunk))

    return elements
