"""Write the weights of a model as other libraries read them: safetensors files, or what ``torch.save`` writes."""

from __future__ import annotations

import copy
import json
import os
import re
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.contents import NO_TIES, FullModelSpec
from lockstep.checkpoint.format.tensors import check_key, dtype_name, elements_of, in_parts
from lockstep.checkpoint.state import memory_key
from lockstep.checkpoint.weights import PICKLED_INDEX, PICKLED_WEIGHTS, parse_size
from lockstep.checkpoint.weights.folder import local_directory, write_folder
from lockstep.checkpoint.weights.streams import without_elements
from lockstep.comm.collectives import Communicator, raise_on_all_ranks
from lockstep.comm.dtensor import whole
from lockstep.comm.tree import StateDict
from lockstep.errors import CheckpointError, UsageError


def is_pretrained(model: nn.Module) -> bool:
    """Return whether ``from_pretrained`` of the model's class can load its weights: a model of transformers, no
    adapters."""
    bases = ((base.__module__, base.__name__) for base in type(model).__mro__)
    return ("transformers.modeling_utils", "PreTrainedModel") in bases and not getattr(
        model, "_hf_peft_config_loaded", False
    )


def configurations(model: Any) -> dict[str, bytes]:
    """Return the files that ``save_pretrained`` writes beside the weights, by name: none for other models.

    Raises:
        CheckpointError: transformers refuses to write them.
    """
    if not is_pretrained(model):
        return {}
    config = copy.deepcopy(model.config)
    # FSDP gives the model a class of its own.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    # transformers before 4.56 has torch_dtype.
    name = "dtype" if hasattr(config, "dtype") else "torch_dtype"
    setattr(config, name, str(model.dtype).removeprefix("torch."))
    try:
        with TemporaryDirectory() as folder:
            # The code of the model's class belongs beside its configuration.
            if getattr(model, "_auto_class", None) is not None:
                from transformers.dynamic_module_utils import custom_object_save

                custom_object_save(model, folder, config=config)
            config.save_pretrained(folder)
            if model.can_generate() and getattr(model, "generation_config", None) is not None:
                model.generation_config.save_pretrained(folder)
            return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"The configuration of {type(model).__name__} could not be written: {error} Mend model.config or "
            "model.generation_config."
        ) from error


def named_to_save(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names under which to save a model's tensors, one for each that several names share.

    Of tied weights it is the one that the model ties the others to, where it says so, else the first; what the model
    does not want to be saved is left out.
    """
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tied = [re.compile(pattern) for pattern in _tied_patterns(model)]
    kept: dict[object, str] = {}
    for name, tensor in tensors.items():
        place = memory_key(tensor) if tensor.numel() else name
        if name not in ignored and (place not in kept or (_any(tied, kept[place]) and not _any(tied, name))):
            kept[place] = name
    chosen = set(kept.values())
    return [name for name in tensors if name in chosen]


def _tied_patterns(model: nn.Module) -> list[str]:
    """Expressions for the names that transformers makes from others when it loads: keys of a dict, before 5 a list."""
    found: list[str] = []
    for prefix, module in model.named_modules():
        patterns = getattr(module, "_tied_weights_keys", None)
        if isinstance(patterns, (list, tuple, dict)):
            found += [f"{prefix}.{pattern}" if prefix else pattern for pattern in patterns]
    return found


def _any(patterns: Iterable[re.Pattern[str]], name: str) -> bool:
    return any(pattern.search(name) for pattern in patterns)


def save_model(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str,
    communicator: Communicator,
) -> None:
    """Write an unwrapped model's weights, and the configuration of a model of transformers; collective.

    Rank 0 writes. Of a sharded model one tensor after the other is gathered and written, so that whatever
    ``max_shard_size`` is, two whole tensors are the most in rank 0's memory, and one in that of the others. All ranks
    return when the files are there, or raise alike.

    Raises:
        ConfigError: ``max_shard_size`` is no size.
        UsageError: ``save_directory`` is a URL or a file, or the model has a state that safetensors cannot hold.
        CheckpointError: a file could not be written; what was there before still is.
    """
    is_writer = communicator.runtime.is_main
    with raise_on_all_ranks(communicator):
        limit, directory = parse_size(max_shard_size), local_directory(save_directory)
        state = checked_tensors(model.state_dict())
        names = named_to_save(model, state)
        documents = configurations(model) if is_writer else {}
    # What rank 0 sees decides: every rank must gather the same tensors in the same order.
    names = communicator.gather_object([names])[0]
    # Lazy: each step gathers one tensor, and all ranks take the same steps.
    gathered = ((name, whole(state[name], keep=is_writer)) for name in names)
    failure: Exception | None = None
    try:
        if is_writer:
            _write(directory, {name: state[name] for name in names}, gathered, limit, documents)
    except Exception as error:
        failure = error
    # Also where writing failed: the others are in these collectives.
    deque(gathered, maxlen=0)
    communicator.error_barrier(failure)


def save_stages(
    model: nn.Module,
    whole_model: FullModelSpec,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str,
    communicator: Communicator,
) -> None:
    """Save a model of which each rank has some blocks: rank 0 gets all of them first, in host memory."""
    with raise_on_all_ranks(communicator):
        limit, directory = parse_size(max_shard_size), local_directory(save_directory)
    state = collect_stages(model.state_dict(), communicator, whole_model)
    with raise_on_all_ranks(communicator):
        if communicator.runtime.is_main:
            tensors = checked_tensors(state)
            tensors = {name: tensors[name] for name in named_to_save(model, tensors)}
            _write(directory, tensors, iter(tensors.items()), limit, configurations(model))


def write_tensors(
    tensors: Mapping[str, torch.Tensor], save_directory: str | os.PathLike[str], limit: int
) -> None:
    """Write tensors as ``save_model`` does those of a model. Raises as it does."""
    state = checked_tensors(tensors)
    state = {name: state[name] for name in named_to_save(nn.Module(), state)}
    _write(local_directory(save_directory), state, iter(state.items()), limit, {})


def _write(
    directory: str,
    tensors: Mapping[str, torch.Tensor],
    values: Iterator[tuple[str, torch.Tensor | None]],
    limit: int,
    documents: Mapping[str, bytes],
) -> None:
    def elements(name: str) -> Iterator[memoryview]:
        given, tensor = next(values)
        assert given == name
        assert tensor is not None
        yield elements_of(tensor)

    write_folder(directory, without_elements(tensors), elements, limit, documents)


def checked_tensors(state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return ``state``, if safetensors files can hold it.

    Raises:
        UsageError: a value is no tensor, has no elements in memory, or a name or dtype that these files lack.
    """
    found = {}
    for name, value in state.items():
        check_key(name)
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{name} is a {type(value).__name__}, but files of weights hold tensors only. Let the module's "
                "get_extra_state() return a tensor, or use save_state."
            )
        if value.is_meta:
            raise UsageError(
                f"{name} is on the meta device, so it has no elements. Load the model's weights before it is saved."
            )
        dtype_name(value, name)
        found[name] = value
    return found


def collect_stages(
    state: Mapping[str, object], communicator: Communicator, spec: FullModelSpec = NO_TIES
) -> StateDict:
    """Return all ranks' entries of a ``state_dict`` on rank 0, in host memory, and nothing on the others; collective.

    One tensor at a time is gathered where it is spread, and sent. Names of one weight share memory afterwards. Of a
    name that several ranks have, the first one's value is taken.

    Args:
        state: What this rank's blocks have.
        spec: The order of the names, and the weights that are tied across ranks.
    """
    rank = communicator.runtime.rank
    with raise_on_all_ranks(communicator):
        tensors, mine = _described(state, spec)
    descriptions: list[list[tuple[str, str, object]]] = communicator.gather_object([mine])
    holders: dict[str, tuple[int, object]] = {}
    firsts: dict[str, str] = {}
    for holder, entries in enumerate(descriptions):
        for name, first, value in entries:
            firsts.setdefault(name, first)
            holders.setdefault(first, (holder, value))
    found: dict[str, object] = {}
    # All ranks have the same descriptions, so all go through the tensors in one order.
    for first, (holder, value) in holders.items():
        if not isinstance(value, torch.Tensor):
            found[first] = value
            continue
        tensor = whole(tensors[first], keep=rank == holder) if first in tensors else None
        found[first] = communicator.transfer(tensor, value, holder, 0)
    if rank > 0:
        return {}
    place = {name: number for number, name in enumerate(spec.names)}
    names = sorted(firsts, key=lambda name: place.get(name, len(place)))
    return {name: found[firsts[name]] for name in names}


def _described(
    state: Mapping[str, object], spec: FullModelSpec
) -> tuple[dict[str, torch.Tensor], list[tuple[str, str, object]]]:
    """Return the tensors by their first names, and (name, first name, value or a tensor without elements) of
    each entry.
    """
    tensors: dict[str, torch.Tensor] = {}
    entries: list[tuple[str, str, object]] = []
    places: dict[object, str] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            entries.append((name, name, value))
            continue
        first = places.setdefault(memory_key(value), name) if value.numel() else name
        first = spec.ties.get(first, first)
        tensors.setdefault(first, value)
        entries.append((name, first, torch.empty(value.shape, dtype=value.dtype, device="meta")))
    return tensors, entries


def warn_of_pickles() -> None:
    warnings.warn(
        "save_model got safe_serialization=False, so weights are saved as a pickle. Read pickles from other "
        "people only by torch.load with weights_only=True. Leave safe_serialization out to write safetensors.",
        stacklevel=3,
    )


def check_folder(directory: str) -> None:
    """Raise UsageError where weights lie that readers would take in place of the pickled ones."""
    others = sorted(path.name for path in Path(directory).glob("model*.safetensors*"))
    if others:
        raise UsageError(
            f"{directory} has {others[0]}, which would be loaded instead of the pickled weights. Name another "
            "folder."
        )


def write_pickled(
    state: Mapping[str, object], directory: str, limit: int | None = None, name: str = PICKLED_WEIGHTS
) -> None:
    """Write ``pytorch_model.bin``, or numbered shards of at most ``limit`` bytes and an index. Files appear whole."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)

    def nbytes(key: str) -> int:
        value = state[key]
        return value.nbytes if isinstance(value, torch.Tensor) else 0

    shards = [list(state)] if limit is None else in_parts(state, nbytes, limit)
    stem = name.removesuffix(".bin")
    names = [f"{stem}-{number:05}-of-{len(shards):05}.bin" for number in range(1, len(shards) + 1)]
    names = [name] if len(shards) == 1 else names
    for old in folder.glob(f"{stem}-*-of-*.bin"):
        old.unlink()
    for one, shard in zip(names, shards, strict=True):
        partial = folder / f"{one}.partial"
        torch.save({key: _own_memory(state[key]) for key in shard}, partial)
        os.replace(partial, folder / one)
    if len(shards) > 1:
        where = {key: one for one, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": sum(map(nbytes, state))}, "weight_map": where}
        (folder / PICKLED_INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        (folder / name).unlink(missing_ok=True)
    else:
        (folder / PICKLED_INDEX).unlink(missing_ok=True)


def _own_memory(value: object) -> object:
    """Return a tensor without the rest of a larger memory that it is a view of: that would be in the file as
    well.
    """
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
