"""State dictionaries as JSON plus named tensors: no pickle.

Plain values, containers and tensors are all that a ``state_dict`` of torch holds; anything else is refused by its
path. Dictionaries with plain texts as keys are JSON objects; what JSON lacks is written as ``{"$": kind, ...}``.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lockstep.checkpoint.format.documents import Document as Document
from lockstep.errors import CheckpointError, UsageError

_TAG = "$"
_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}
_DICTIONARIES = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
# By name and not by getattr, for which torch imports modules.
_DTYPES = {
    str(found).removeprefix("torch."): found
    for found in vars(torch).values()
    if isinstance(found, torch.dtype)
}


def encode(value: object, tensors: dict[str, torch.Tensor], path: str) -> object:
    """Return a JSON value for ``value``; tensors are put into ``tensors`` under the path of their place, as
    they are.

    Raises:
        UsageError: an object that is neither a plain value, a container nor a tensor.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return value if _is_plain(value) else {_TAG: "float", "value": repr(float(value))}
    if isinstance(value, np.ndarray):
        name = _free_name(path, tensors)
        tensors[name] = _as_tensor(value, path)
        return {_TAG: "array", "name": name}
    if isinstance(value, torch.Tensor):
        name = _free_name(path, tensors)
        tensors[name] = value.detach() if value.requires_grad else value
        return {_TAG: "tensor", "name": name}
    # A longdouble's item is a longdouble: it is refused below.
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return encode(value.item(), tensors, path)
    if isinstance(value, deque):
        items = [encode(item, tensors, f"{path}.{i}") for i, item in enumerate(value)]
        return {_TAG: "deque", "items": items, "longest": value.maxlen}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [encode(item, tensors, f"{path}.{i}") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: _kind_of(value, _SEQUENCES), "items": items}
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, path)
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: "bytes", "value": base64.b64encode(value).decode("ascii")}
    if isinstance(value, complex):
        return {_TAG: "complex", "items": [encode(part, tensors, path) for part in (value.real, value.imag)]}
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {_TAG: "device", "value": str(value)}
    raise UsageError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold. Let state_dict() return plain values, "
        "containers and tensors."
    )


def decode(value: object, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the inverse of ``encode``.

    Raises:
        CheckpointError: ``value`` is nothing that ``encode`` returns, or names a tensor that is not there.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item, tensors) for key, item in value.items()}
    try:
        return _decode_tagged(value[_TAG], value, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"The checkpoint holds {str(value)[:80]}, which is not a value ({type(error).__name__}: {error}). "
            "Load another checkpoint."
        ) from error


def tensor_names(value: object) -> list[str]:
    """Return the names of all tensors in what ``encode`` returned."""
    if isinstance(value, list):
        return [name for item in value for name in tensor_names(item)]
    if not isinstance(value, dict):
        return []
    if value.get(_TAG) in ("tensor", "array"):
        return [str(value.get("name"))]
    return [name for item in value.values() for name in tensor_names(item)]


def _decode_tagged(kind: str, value: Document, tensors: Mapping[str, torch.Tensor]) -> object:
    if kind == "tensor":
        return tensors[value["name"]]
    if kind == "array":
        return tensors[value["name"]].numpy()
    if kind == "float":
        return float(value["value"])
    if kind == "bytes":
        return base64.b64decode(value["value"], validate=True)
    if kind == "complex":
        real, imaginary = _items(value, tensors)
        return complex(real, imaginary)
    if kind == "dtype":
        return _DTYPES[value["value"]]
    if kind == "device":
        return torch.device(_key_text(value["value"]))
    if kind == "deque":
        if isinstance(value["longest"], bool):
            raise TypeError("a length is a whole number")
        return deque(_items(value, tensors), maxlen=value["longest"])
    if kind in _DICTIONARIES:
        pairs = [(key, item) for key, item in _items(value, tensors)]
        return _DICTIONARIES[kind](pairs) if kind != "counter" else _counter(dict(pairs))
    return _SEQUENCES[kind](_items(value, tensors))


def _items(value: dict[str, object], tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    if not isinstance(value["items"], list):
        raise TypeError("items are a list")
    return [decode(item, tensors) for item in value["items"]]


def _key_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a name is a text")
    return value


def _counter(counts: dict[object, object]) -> Counter[object]:
    if not all(isinstance(count, (int, float)) for count in counts.values()):
        raise TypeError("a count is a number")
    return Counter(counts)


def _encode_mapping(value: Mapping[object, object], tensors: dict[str, torch.Tensor], path: str) -> object:
    kind = _kind_of(value, {name: cls for name, cls in _DICTIONARIES.items() if cls is not dict}) or "dict"
    # With the tag among its keys, a plain object would be read as a tagged value.
    if kind == "dict" and _TAG not in value and all(type(key) is str for key in value):
        return {key: encode(item, tensors, f"{path}.{key}") for key, item in value.items()}
    pairs = [
        [encode(key, tensors, f"{path}.key"), encode(item, tensors, f"{path}.{key}")]
        for key, item in value.items()
    ]
    return {_TAG: kind, "items": pairs}


def _kind_of(value: object, kinds: Mapping[str, type]) -> str:
    return next((name for name, kind in kinds.items() if isinstance(value, kind)), "")


def _free_name(path: str, tensors: Mapping[str, torch.Tensor]) -> str:
    # Keys may have dots in them, or be 1 beside "1".
    while path in tensors:
        path += "'"
    return path


def _as_tensor(array: np.ndarray, path: str) -> torch.Tensor:
    try:
        return torch.from_numpy(np.array(array, order="C", copy=True))
    except (TypeError, ValueError) as error:
        # It holds no numbers, or has another order of bytes than this machine.
        raise UsageError(
            f"{path} is an array of {array.dtype}, which a checkpoint cannot hold. Let state_dict() return numbers."
        ) from error


def _is_plain(value: int | float) -> bool:
    """Return whether JSON has it: not infinite, not NaN."""
    # inf - inf and nan - nan are nan.
    return isinstance(value, int) or value - value == 0
