"""From the restricted process's JSON to values: what each name that a pickle calls becomes.

The names are the only ones that a pickle may use, each an exact pair of module and name. None is looked up: not
imported, not split at its dots.
"""

from __future__ import annotations

import base64
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lockstep.compat.checkpoints.container import STORAGES
from lockstep.compat.checkpoints.tensors import (
    DTYPES,
    MalformedError,
    Storage,
    StoredObject,
    UnreadableError,
    counts,
)

Maker = Callable[..., Any]
Array = npt.NDArray[np.generic]


class Name(NamedTuple):
    """A name of the list, as an argument of a call."""

    module: str
    name: str


class Unbuilt:
    """An array that is filled by its state."""


def decode(value: object, storages: Sequence[Storage] = ()) -> Any:
    """Return the value that a line of the restricted process's JSON stands for.

    Raises:
        UnreadableError: it uses a name that is not on the list, or a name for what it is not for.
        MalformedError: the JSON is not of the form that the process writes.
        CheckpointError: the file is damaged.
    """
    try:
        return _Decoder(storages).value(value)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, IndexError) as error:
        raise MalformedError(f"{type(error).__name__}: {str(error)[:160]}") from None


class _Decoder:
    def __init__(self, storages: Sequence[Storage]) -> None:
        self.storages = storages

    def value(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.value(item) for item in node]
        if not isinstance(node, dict):
            return node
        kind = node["$"]
        if kind in _SCALARS:
            return _SCALARS[kind](node["value"])
        if kind == "call":
            return self.call(node)
        if kind == "dict":
            return self.pairs(node)
        if kind == "name":
            found = _listed(*node["items"])
            if isinstance(found, Name):
                raise UnreadableError(f"it holds {'.'.join(found)} where a plain value is expected")
            return found
        return _SEQUENCES[kind](self.value(item) for item in node["items"])

    def pairs(self, node: Any) -> dict[object, object]:
        return {_key(self.value(key)): self.value(item) for key, item in node.get("pairs", ())}

    def argument(self, node: Any, of_type: bool) -> Any:
        """Return a value, or what is an argument only. ``of_type``: a tuple has the arguments of a further call."""
        kind = node["$"] if isinstance(node, dict) else ""
        if kind == "tuple" and of_type:
            return tuple(self.argument(item, False) for item in node["items"])
        if kind == "storage":
            return self.storages[node["items"][0]]
        return _listed(*node["items"]) if kind == "name" else self.value(node)

    def call(self, node: Any) -> Any:
        """Return what a name makes of its arguments, then of what is put into it."""
        target, arguments, *appended = node["items"]
        name = _listed(*target["items"])
        make = None if isinstance(name, torch.dtype) else _MAKERS[name]
        if make is None:
            raise UnreadableError(
                f"its pickle calls {'.'.join(target['items'])}, which is a name for a type only"
            )
        made = make(*(self.argument(item, make is _tensor_of_type) for item in arguments["items"]))
        if "pairs" in node:
            made.update(self.pairs(node))
        if appended:
            made.extend(map(self.value, appended))
        if "state" in node:
            return _with_state(made, self.value(node["state"]))
        if isinstance(made, Unbuilt):
            raise MalformedError("an array without a state")
        return made


def _listed(module: str, name: str) -> Name | torch.dtype:
    """Return the entry of the list. Raises UnreadableError, by name, for anything else."""
    if module == "torch" and name in DTYPES:
        return DTYPES[name]
    if (module, name) not in _MAKERS:
        raise UnreadableError(f"it needs {module}.{name}, which is not on the list of plain classes")
    return Name(module, name)


def _key(key: Any) -> Any:
    """Return a key that is cheap to hash, whoever chose it."""
    for part in key if isinstance(key, tuple) else (key,):
        if not (
            part is None
            or isinstance(part, (str, StoredObject))
            or (isinstance(part, int) and abs(part) < 2**53)
        ):
            raise MalformedError(f"a key of type {type(part).__name__}")
    return key


def _with_state(made: Any, state: Any) -> Any:
    """Give an object its state, as BUILD does."""
    if isinstance(made, StoredObject):
        return replace(made, state=state)
    if isinstance(made, Unbuilt):
        _, shape, dtype, fortran, data = state
        return _array(data, dtype, shape, "F" if fortran else "C")
    if isinstance(made, np.dtype):
        if state[1] not in ("<", "|", "="):
            raise UnreadableError("it holds a NumPy array of a big-endian machine")
        return made
    # Versions of modules, which torch adds.
    if isinstance(made, dict) and isinstance(state, dict) and not state.keys() - {"_metadata"}:
        return made
    raise UnreadableError(f"its pickle gives a {type(made).__name__} a state")


# ----------------------------------------------------------------------------------------- what calls make


def _tensor_v2(
    storage: Storage, offset: int, shape: object, stride: object, grad: object = False, hooks: object = None,
    lazy: Any = None,
) -> torch.Tensor:  # fmt: skip
    return _with_lazy(storage.tensor(storage.dtype, offset, shape, stride), lazy)


def _tensor_v3(
    storage: Storage, offset: int, shape: object, stride: object, grad: object, hooks: object, dtype: Any,
    lazy: Any = None,
) -> torch.Tensor:  # fmt: skip
    return _with_lazy(storage.tensor(dtype, offset, shape, stride), lazy)


def _with_lazy(tensor: torch.Tensor, lazy: dict[str, bool] | None) -> torch.Tensor:
    """Return the tensor with what is still to be done to its elements: conjugation, negation."""
    for word, is_set in (lazy or {}).items():
        done = {"conj": tensor.conj().resolve_conj, "neg": tensor.neg}[word]
        tensor = done() if is_set else tensor
    return tensor


def _parameter(tensor: object, *_: object) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError("a parameter of something else than a tensor")
    return tensor


def _tensor_of_type(function: Any, kind: Any, arguments: Any, attributes: Any) -> Any:
    """Rebuild a tensor of another type without its attributes; of a DTensor keep what its state says."""
    if (function, kind) == (_WRAPPED, _DTENSOR):
        attributes = attributes[1] if isinstance(attributes, tuple) else attributes
        return StoredObject(".".join(_DTENSOR), {**attributes, "shape": counts(arguments[2])})
    if function not in _REBUILDERS or kind not in _TENSOR_TYPES:
        raise UnreadableError(f"its pickle rebuilds {kind} by {function}")
    return _REBUILDERS[function](*arguments)


def _of(kind: Maker) -> Maker:
    """Make a container of items that are there."""

    def make(items: Any = (), *_: object) -> Any:
        if not isinstance(items, (list, tuple, set, frozenset)):
            raise TypeError(f"a {kind} of a {type(items).__name__}")
        return kind(items)

    return make


def _hashed(kind: Maker) -> Maker:
    return lambda items: kind(map(_key, items))


def _mapping(kind: Maker) -> Maker:
    """OrderedDict and Counter take pairs or a dict, defaultdict a factory, dict nothing."""

    def make(given: Any = ()) -> Any:
        if given is None or isinstance(given, Name):
            given = ()
        pairs = given.items() if isinstance(given, dict) else given
        return kind({_key(key): item for key, item in pairs})

    return make


def _joined(separator: str) -> Maker:
    return lambda *parts: separator.join(str(part) for part in parts if isinstance(part, (str, int)))


def _encoded(text: Any, encoding: Any) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise UnreadableError(f"its pickle encodes by {str(encoding)[:40]!r}")
    return bytes(text.encode("latin-1"))


def _bytes(data: Any = b"", *encoding: Any) -> bytes:
    if isinstance(data, str):
        return _encoded(data, *encoding)
    if not isinstance(data, bytes):
        raise TypeError(f"bytes of a {type(data).__name__}")
    return data


def _dtype(code: Any, *_: object) -> np.dtype[Any]:
    if code not in ("b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"):
        raise UnreadableError(
            f"it holds a NumPy array of {str(code)[:40]!r}, but only plain numbers are read"
        )
    return np.dtype("<" + code)


def _array(data: Any, dtype: Any, shape: object, order: Any) -> Array:
    if not isinstance(data, bytes) or not isinstance(dtype, np.dtype):
        raise TypeError("an array of other data")
    return np.frombuffer(data, dtype).reshape(counts(shape), order=order).copy()


def _scalar(dtype: Any, data: Any) -> object:
    return _array(data, dtype, (), "C").item()


def _unbuilt(kind: Any, *_: object) -> Unbuilt:
    if kind != ("numpy", "ndarray"):
        raise UnreadableError(f"its pickle reconstructs {kind} as an array")
    return Unbuilt()


def _record(name: str) -> Maker:
    return lambda: StoredObject(name, None)


def _reconstructed(kind: Any, base: Any, state: object) -> Any:
    """Protocols 0 and 1 make objects by ``copyreg._reconstructor(class, object, None)``."""
    if base[1] != "object" or state is not None or kind not in _RECORDS:
        raise UnreadableError(f"its pickle reconstructs {kind}")
    return _RECORDS[kind]()


def _plain(value: object) -> object:
    if not isinstance(value, (int, str)):
        raise TypeError("a member of an enumeration that is no number or text")
    return value


_SCALARS: dict[str, Maker] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "bytes": lambda text: base64.b64decode(text, validate=True),
}
_SEQUENCES: dict[str, Maker] = {
    "tuple": tuple, "set": _hashed(set), "frozenset": _hashed(frozenset)
}  # fmt: skip


def _names(modules: str, names: str, make: Maker | None) -> dict[Name, Maker | None]:
    return {Name(module, name): make for module in modules.split() for name in names.split()}


_WRAPPED = Name("torch._utils", "_rebuild_wrapper_subclass")
_DTENSOR = Name("torch.distributed.tensor", "DTensor")
_REBUILDERS: dict[Any, Any] = {
    **_names("torch._utils", "_rebuild_tensor _rebuild_tensor_v2", _tensor_v2),
    **_names("torch._utils", "_rebuild_tensor_v3", _tensor_v3),
    **_names("torch._utils", "_rebuild_parameter _rebuild_parameter_with_state", _parameter),
}
_TENSOR_TYPES = {
    **_names("torch", "Tensor", None),
    **_names("torch.nn.parameter", "Parameter Buffer", None),
}
# Classes whose state is kept as it is, under their name.
_RECORDS: dict[Any, Any] = {
    Name(module, name): _record(f"{module}.{name}")
    for module, names in {
        "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata "
        "ChunkStorageMetadata TensorProperties MetadataIndex StorageMeta",
        "torch.distributed.checkpoint.filesystem": "_StorageInfo",
        # Megatron keeps the plans of all ranks in the metadata.
        "torch.distributed.checkpoint.planner": "SavePlan WriteItem TensorWriteData BytesIOWriteData",
        "torch.distributed.tensor._dtensor_spec": "DTensorSpec",
        "torch.distributed.device_mesh": "DeviceMesh",
        "torch.distributed._mesh_layout": "_MeshLayout _FlatLayout",
        "torch.distributed.tensor.placement_types": "Shard Replicate Partial _StridedShard",
        "deepspeed.runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler",
        "deepspeed.checkpoint.universal_checkpoint": "SubparamShape",
        "deepspeed.utils.tensor_fragment": "fragment_address",
        "accelerate.data_loader": "SeedableRandomSampler IterableDatasetShard",
        "torch.utils.data.dataset": "TensorDataset",
    }.items()
    for name in names.split()
}
_BUILTINS = "builtins __builtin__"
_ARRAYS = "numpy.core.multiarray numpy._core.multiarray"
_MAKERS: dict[Any, Maker | None] = {
    **dict.fromkeys(STORAGES),
    **_REBUILDERS,
    **_TENSOR_TYPES,
    **_RECORDS,
    **dict.fromkeys((_WRAPPED, _DTENSOR)),
    **_names("torch.distributed.tensor._dtensor_spec", "TensorMeta ShardOrderEntry", lambda *fields: fields),
    **_names("torch._tensor", "_rebuild_from_type_v2", _tensor_of_type),
    **_names("torch._C", "Generator", lambda device: StoredObject("torch.Generator", None)),
    **_names("torch", "Size", lambda sizes: counts(tuple(sizes))),
    **_names("torch", "device", _joined(":")),
    **_names("torch.serialization", "_get_layout", _joined("")),
    **_names("pathlib pathlib._local", "PosixPath PurePosixPath WindowsPath PureWindowsPath", _joined("/")),
    **_names("collections", "OrderedDict defaultdict", _mapping(dict)),
    **_names("collections", "Counter", _mapping(Counter)),
    **_names("collections", "deque", _of(deque)),
    **_names(_BUILTINS, "set", _of(_hashed(set))),
    **_names(_BUILTINS, "frozenset", _of(_hashed(frozenset))),
    **_names(_BUILTINS, "list", _of(list)),
    **_names(_BUILTINS, "tuple", _of(tuple)),
    **_names(_BUILTINS, "dict", _mapping(dict)),
    **_names(_BUILTINS, "bytes bytearray", _bytes),
    # As the factory of a defaultdict, or what an object is reconstructed from.
    **_names(_BUILTINS, "int float object", None),
    **_names("_codecs", "encode", _encoded),
    **_names("copyreg copy_reg", "_reconstructor", _reconstructed),
    **_names(_ARRAYS, "_reconstruct", _unbuilt),
    **_names(_ARRAYS, "scalar", _scalar),
    **_names("numpy.core.numeric numpy._core.numeric", "_frombuffer", _array),
    **_names("numpy", "ndarray", None),
    **_names("numpy", "dtype", _dtype),
    # Members of enumerations become their values.
    **_names("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", _plain),
    **_names("torch.distributed.checkpoint.planner", "WriteItemType", _plain),
    **_names("deepspeed.runtime.zero.config", "ZeroStageEnum", _plain),
}
