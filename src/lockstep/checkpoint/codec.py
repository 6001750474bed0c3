"""State dictionaries as JSON plus named tensors: no pickle.

Plain values, containers and tensors are all that a ``state_dict`` of torch holds; anything else is
refused by its path. Containers that JSON lacks are written as ``{"<kind>": ...}``.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import numpy as np
import torch

from lockstep.errors import UsageError

Tensors = dict[str, torch.Tensor]
_TAG = "$"


def encode(value: Any, tensors: Tensors, path: str = "state") -> Any:
    """A JSON value for ``value``; tensors are put into ``tensors`` under the path of their place.

    Raises:
        UsageError: an object that is neither a plain value, a container nor a tensor.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)) and type(value) in (int, float):
        return value if _is_plain_number(value) else {_TAG: "float", "value": repr(value)}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        while path in tensors:  # keys with dots in them, or 1 beside "1"
            path += "'"
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach().cpu().contiguous().clone()
        return {_TAG: "tensor", "name": path}
    if isinstance(value, np.generic):
        return encode(value.item(), tensors, path)
    if isinstance(value, np.ndarray):
        tensors[path] = torch.from_numpy(np.ascontiguousarray(value).copy())
        return {_TAG: "array", "name": path}
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        items = [encode(item, tensors, f"{path}.{i}") for i, item in enumerate(value)]
        return items if type(value) is list else {_TAG: _sequence_kind(value), "items": items}
    if isinstance(value, dict):
        pairs = [
            [encode(key, tensors, f"{path}.key"), encode(item, tensors, f"{path}.{key}")]
            for key, item in value.items()
        ]
        return {_TAG: "counter" if isinstance(value, Counter) else "dict", "items": pairs}
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "value": str(value).removeprefix("torch.")}
    raise UsageError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold. Let state_dict() return plain values, "
        "containers and tensors."
    )


def decode(value: Any, tensors: Tensors) -> Any:
    """The inverse of ``encode``."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value[_TAG]
    if kind == "tensor":
        return tensors[value["name"]]
    if kind == "array":
        return tensors[value["name"]].numpy()
    if kind == "float":
        return float(value["value"])
    if kind == "dtype":
        return getattr(torch, value["value"])
    if kind in ("dict", "counter"):
        decoded = {decode(key, tensors): decode(item, tensors) for key, item in value["items"]}
        return decoded if kind == "dict" else Counter(decoded)
    items = [decode(item, tensors) for item in value["items"]]
    return _SEQUENCES[kind](items)


_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}


def _sequence_kind(value: Any) -> str:
    return next((name for name, kind in _SEQUENCES.items() if isinstance(value, kind)), "tuple")


def _is_plain_number(value: int | float) -> bool:
    return isinstance(value, int) or value - value == 0  # not inf, not NaN: JSON has neither
