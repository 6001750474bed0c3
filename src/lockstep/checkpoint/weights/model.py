"""Model weights as safetensors files, one or many with an index: names, sizes, and what scripts call by name."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from lockstep.checkpoint.weights import parse_size
from lockstep.comm.dtensor import is_dtensor
from lockstep.comm.tree import children
from lockstep.model.changes import PartialStateMark
from lockstep.runtime import process

logger = logging.getLogger(__name__)


def save_object(value: Any, file: Any, safe_serialization: bool = False) -> None:
    """Write a dict of tensors by ``safetensors.torch.save_file``, any other object by ``torch.save``. The file appears
    whole.

    Raises:
        UsageError: this rank has only parts of some tensors.
    """
    refuse_parts(value)
    path = None if hasattr(file, "write") else os.path.realpath(file)
    # Pipes and devices keep their names.
    if path is None or (os.path.exists(path) and not os.path.isfile(path)):
        _write_object(value, file, safe_serialization)
        return
    partial = f"{path}.part"
    try:
        _write_object(value, partial, safe_serialization)
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.remove(partial)


def refuse_parts(value: object, depth: int = 4) -> None:
    """Raise UsageError if this rank has only parts of some tensors in nested values, or of a module's parameters."""
    if isinstance(value, nn.Module):
        value = list(value.parameters())
    if is_dtensor(value):
        from lockstep.torch_internals.dtensor_operators import refuse_to_save_part

        refuse_to_save_part(value)
    if isinstance(mark := getattr(value, PartialStateMark.NAME, None), PartialStateMark):
        mark.__reduce__()
    for _, part in (children(value) or ()) if depth else ():
        refuse_parts(part, depth - 1)


def _write_object(value: Any, file: Any, safe_serialization: bool) -> None:
    if safe_serialization:
        # Here, because it imports pydantic, as below.
        from lockstep.checkpoint.format.tensors import check_key

        for name in value:
            check_key(name)
        save_file(_without_ties(value), file, metadata={"format": "pt"})
    else:
        torch.save(value, file)


def save(obj: object, f: object, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write an object to a file, on rank 0 only. The other ranks do nothing and do not wait.

    Args:
        obj: Any object that can be pickled; with ``safe_serialization`` a mapping name -> tensor of any shape.
        f: The path of the file.
        save_on_each_node: Write on local rank 0 of each machine.
        safe_serialization: Write safetensors, which cannot run code when it is read. Otherwise ``torch.save`` writes.

    Raises:
        UsageError: the object has tensors of which this rank has only a part.

    Examples:
        ```python
        import torch
        from lockstep import PartialState
        from lockstep.utils import save

        state = PartialState()
        save({"weight": torch.zeros(4)}, "saved.safetensors", safe_serialization=True)  # rank 0 writes
        state.wait_for_everyone()
        ```
    """
    # On ranks that write nothing, too: all raise alike.
    refuse_parts(obj)
    runtime = process.start_runtime()
    if runtime.is_local_main if save_on_each_node else runtime.is_main:
        save_object(obj, f, safe_serialization)


def write_weights(
    state_dict: Mapping[str, torch.Tensor],
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
) -> None:
    """Write ``model.safetensors``, or numbered shards of at most ``max_shard_size`` bytes with an index.

    Tensors that share memory (tied weights) are written once, under their first name. Weights that are in the
    folder already are replaced as ``folder.WeightsFolder`` says.

    Raises:
        ConfigError: ``max_shard_size`` is not a number of bytes or a text such as ``"500MB"``.
        CheckpointError: a file could not be written; what was there before still is.
    """
    # Here, because it imports pydantic, which importing lockstep must not need.
    from lockstep.checkpoint.weights.export import write_tensors

    write_tensors(state_dict, save_directory, parse_size(max_shard_size))


def _without_ties(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    seen: dict[object, str] = {}
    kept, left_out = {}, []
    for name, tensor in state_dict.items():
        # Files hold elements, and no bit that says that they are conjugated or negated.
        tensor = tensor.detach().resolve_conj().resolve_neg()
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in seen:
            left_out.append(f"{name} (that of {seen[place]})")
            continue
        seen[place] = name
        tensor = tensor.cpu().contiguous()
        is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
        kept[name] = tensor.clone() if is_view else tensor
    if left_out:
        logger.warning(
            "Removed shared tensors from the file, because the file has their memory under another name: "
            f"{', '.join(left_out)}."
        )
    return kept
