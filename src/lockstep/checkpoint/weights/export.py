"""Write the weights of a model as other libraries read them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.format.tensorfile import check_key, dtype_name
from lockstep.checkpoint.training import Whole
from lockstep.checkpoint.weights.folder import local_directory, write_folder
from lockstep.checkpoint.weights.names import parse_size
from lockstep.checkpoint.weights.pretrained import configurations, named_to_save
from lockstep.checkpoint.weights.stages import collect_stages
from lockstep.checkpoint.weights.weightfile import described
from lockstep.comm.collectives import Communicator, as_bytes
from lockstep.comm.dtensor import whole
from lockstep.comm.together import together
from lockstep.errors import UsageError


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
    with together(communicator):
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
    communicator.agree(failure)


def save_stages(
    model: nn.Module,
    whole_model: Whole,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str,
    communicator: Communicator,
) -> None:
    """``save_model`` for a model of which each rank has some blocks: rank 0 gets all of them, in host memory, first."""
    with together(communicator):
        limit, directory = parse_size(max_shard_size), local_directory(save_directory)
    state = collect_stages(model.state_dict(), communicator, whole_model)
    with together(communicator):
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

    write_folder(directory, described(tensors), elements, limit, documents)


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
