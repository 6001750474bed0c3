"""Write the weights of a model as other libraries read them."""

from __future__ import annotations

import copy
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.contents import FullModelSpec
from lockstep.checkpoint.format.tensorfile import check_key, dtype_name
from lockstep.checkpoint.state import memory_key
from lockstep.checkpoint.weights.folder import local_directory, write_folder
from lockstep.checkpoint.weights.names import parse_size
from lockstep.checkpoint.weights.stages import collect_stages
from lockstep.checkpoint.weights.weightfile import without_elements
from lockstep.comm.collectives import Communicator, as_bytes, raise_on_all_ranks
from lockstep.comm.dtensor import whole
from lockstep.errors import CheckpointError, UsageError


def is_pretrained(model: nn.Module) -> bool:
    """Whether ``from_pretrained`` of the model's class can load its weights: a model of transformers, no adapters."""
    bases = ((base.__module__, base.__name__) for base in type(model).__mro__)
    return ("transformers.modeling_utils", "PreTrainedModel") in bases and not getattr(
        model, "_hf_peft_config_loaded", False
    )


def configurations(model: Any) -> dict[str, bytes]:
    """The files that ``save_pretrained`` writes beside the weights, by name: none for other models.

    Raises:
        CheckpointError: transformers refuses to write them.
    """
    if not is_pretrained(model):
        return {}
    config = copy.deepcopy(model.config)
    # FSDP gives the model a class of its own.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    name = "dtype" if hasattr(config, "dtype") else "torch_dtype"  # before 4.56
    setattr(config, name, str(model.dtype).removeprefix("torch."))
    try:
        with TemporaryDirectory() as folder:
            if getattr(model, "_auto_class", None) is not None:  # its code lies beside it
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
    """The names under which to save a model's tensors, one for each that several names share.

    Of tied weights it is the one that the model ties the others to, where it says so, else the first; what the model
    does not want to be saved is left out.
    """
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tied = [re.compile(pattern) for pattern in _tied_patterns(model)]
    kept: dict[Any, str] = {}
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
    gathered = ((name, whole(state[name], keep=is_writer)) for name in names)
    failure: Exception | None = None
    try:
        if is_writer:
            _write(directory, {name: state[name] for name in names}, gathered, limit, documents)
    except Exception as error:
        failure = error
    deque(gathered, maxlen=0)  # also where writing failed: the others are in these collectives
    communicator.error_barrier(failure)


def save_stages(
    model: nn.Module,
    whole_model: FullModelSpec,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str,
    communicator: Communicator,
) -> None:
    """``save_model`` for a model of which each rank has some blocks: rank 0 gets all of them, in host memory, first."""
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
        yield memoryview(as_bytes(tensor.detach().cpu()).numpy())  # type: ignore[arg-type]

    write_folder(directory, without_elements(tensors), elements, limit, documents)


def checked_tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """``state``, if safetensors files can hold it.

    Raises:
        UsageError: a value is no tensor, has no elements in memory, or a name or dtype that these files lack.
    """
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
    return dict(state)
