"""The only names that a pickle may use, each an exact pair of module and name, and what each of them becomes.

A name is never looked up: not imported, not split at its dots. A constructor checks its arguments and
returns an inert value of ``nodes``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .arrays import array_of_buffer, array_type, byte_order, empty_array, fill_array, scalar
from .nodes import (
    LAZY,
    Array,
    ArrayType,
    Items,
    Mapping,
    PickledItems,
    Record,
    RefusedFile,
    Storage,
    Symbol,
    Tensor,
    TorchDtype,
    is_size,
    needs,
    sizes,
)

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
_LEGACY_STORAGES = {
    "Bool": "bool", "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64",
    "Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Double": "float64", "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}  # fmt: skip
# Classes whose state is kept as it is, under their name.
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
    "accelerate.data_loader": ("SeedableRandomSampler", "IterableDatasetShard"),
    "torch.utils.data.dataset": ("TensorDataset",),
}  # fmt: skip
# Enumerations become their values.
_ENUMERATIONS = {
    "torch.distributed.checkpoint.metadata": ("_MEM_FORMAT_ENCODING",),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
}
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")


def symbol(module: str, name: str) -> Symbol | TorchDtype:
    """The entry of the list. Raises RefusedFile, by name, for anything else."""
    found = _ALLOWED.get((module, name))
    if found is None:
        raise RefusedFile(f"it needs {module}.{name}, which is not on the list of plain classes")
    return found


def build(target: object, state: object) -> None:
    """What BUILD does: give an object its state."""
    if isinstance(target, Record) and not target.built:
        target.state, target.built = state, True
    elif isinstance(target, Array) and not target.dtype:
        fill_array(target, state)
    elif isinstance(target, ArrayType):
        target.order = byte_order(state)
    elif isinstance(target, Mapping) and isinstance(state, Mapping):
        # Versions of modules, which torch adds.
        others = [key for key, _ in state.pairs if key != "_metadata"]
        if others:
            raise RefusedFile(f"its pickle gives a dict the attribute {str(others[0])[:60]!r}")
    else:
        raise RefusedFile(f"its pickle gives a {type(target).__name__} a state")


# ------------------------------------------------------------------------------------------ constructors


def _constant(name: str) -> Callable[[list[object]], object]:
    def make(arguments: list[object]) -> object:
        raise RefusedFile(f"its pickle calls {name}, which is a name for a type only")

    return make


def _tensor(name: str, storage: Any, dtype: str, offset: Any, size: object, stride: object) -> Tensor:
    needs(name, isinstance(storage, Storage) and is_size(offset))
    shape, strides = sizes(name, size), sizes(name, stride)
    needs(name, len(shape) == len(strides) <= 64)
    count, last = 1, offset
    for length, step in zip(shape, strides, strict=True):
        count *= length
        last += (length - 1) * step
    elements = storage.nbytes // ITEM_BYTES[dtype]
    if count > elements or (count and last >= elements):
        raise RefusedFile(f"a tensor of shape {shape} reaches beyond its {elements} stored elements")
    return Tensor(storage, dtype, offset, shape, strides)


def _tensor_v2(arguments: PickledItems) -> Tensor:
    needs("_rebuild_tensor_v2", 4 <= len(arguments) <= 7 and isinstance(arguments[0], Storage))
    storage, offset, size, stride = arguments[:4]
    tensor = _tensor("_rebuild_tensor_v2", storage, storage.dtype, offset, size, stride)
    return _with_lazy("_rebuild_tensor_v2", tensor, arguments[6:])


def _tensor_v3(arguments: list[Any]) -> Tensor:
    needs("_rebuild_tensor_v3", 7 <= len(arguments) <= 8 and isinstance(arguments[6], TorchDtype))
    storage, offset, size, stride = arguments[:4]
    tensor = _tensor("_rebuild_tensor_v3", storage, arguments[6].dtype, offset, size, stride)
    return _with_lazy("_rebuild_tensor_v3", tensor, arguments[7:])


def _with_lazy(name: str, tensor: Tensor, metadata: Sequence[object]) -> Tensor:
    """The tensor with what is still to be done to its elements: conjugation, negation."""
    for found in metadata:
        needs(name, found is None or isinstance(found, Mapping))
        for key, value in found.pairs if isinstance(found, Mapping) else ():
            needs(name, key in LAZY and isinstance(value, bool))
            tensor.lazy += [str(key)] if value else []
    return tensor


def _parameter(arguments: PickledItems) -> Tensor:
    needs("_rebuild_parameter", 3 <= len(arguments) <= 4 and isinstance(arguments[0], Tensor))
    value: Tensor = arguments[0]
    return value


def _tensor_of_type(arguments: PickledItems) -> object:
    """``(function, type, arguments, attributes)``; the attributes of a tensor are left out."""
    needs("_rebuild_from_type_v2", len(arguments) == 4)
    function, kind, inner, _ = arguments
    needs("_rebuild_from_type_v2", isinstance(function, Symbol) and function.about == "rebuild")
    needs("_rebuild_from_type_v2", isinstance(kind, Symbol) and kind.about == "tensor type")
    needs("_rebuild_from_type_v2", isinstance(inner, Items) and inner.kind == "tuple")
    return function.make(inner.items)


def _size(arguments: PickledItems) -> Items:
    needs("torch.Size", len(arguments) == 1 and isinstance(arguments[0], (Items, list)))
    items = arguments[0].items if isinstance(arguments[0], Items) else arguments[0]
    return Items("tuple", sizes("torch.Size", Items("tuple", items)))


def _joining(name: str, separator: str) -> Callable[[list[object]], str]:
    def make(arguments: list[object]) -> str:
        needs(name, all(isinstance(part, (str, int)) for part in arguments))
        return separator.join(map(str, arguments))

    return make


def _mapping(arguments: PickledItems) -> Mapping:
    """OrderedDict and Counter take pairs or a dict, defaultdict a factory, dict nothing."""
    needs("a kind of dict", len(arguments) <= 1)
    given = arguments[0] if arguments else []
    if given is None or isinstance(given, Symbol):
        return Mapping()
    if isinstance(given, Mapping):
        return Mapping(list(given.pairs))
    needs("a kind of dict", isinstance(given, list))
    pairs = [item.items if isinstance(item, Items) else item for item in given]
    needs("a kind of dict", all(isinstance(pair, list) and len(pair) == 2 for pair in pairs))
    return Mapping([(key, value) for key, value in pairs])


def _counter(arguments: list[object]) -> Mapping:
    return Mapping(_mapping(arguments).pairs, counts=True)


def _items(kind: str) -> Callable[[PickledItems], object]:
    def make(arguments: PickledItems) -> object:
        most = 2 if kind == "deque" else 1
        needs(kind, len(arguments) <= most and all(isinstance(a, (list, Items)) for a in arguments[:1]))
        given = arguments[0] if arguments else []
        items = list(given.items if isinstance(given, Items) else given)
        return items if kind == "list" else Items(kind, items)

    return make


def _encoded(arguments: list[object]) -> bytes:
    needs("_codecs.encode", len(arguments) == 2 and isinstance(arguments[0], str))
    needs("_codecs.encode", arguments[1] in ("latin1", "latin-1"))
    return str(arguments[0]).encode("latin-1")


def _bytes(arguments: PickledItems) -> bytes:
    needs("bytes", len(arguments) in (0, 1, 2))
    # bytearray(text, "latin-1") of protocol 2.
    if arguments and isinstance(arguments[0], str):
        return _encoded(arguments)
    needs("bytes", all(isinstance(a, bytes) for a in arguments) and len(arguments) < 2)
    return arguments[0] if arguments else b""


def _record(name: str) -> Callable[[list[object]], Record]:
    def make(arguments: list[object]) -> Record:
        needs(name, not arguments)
        return Record(name)

    return make


def _generator(arguments: list[object]) -> Record:
    needs("torch.Generator", len(arguments) == 1 and isinstance(arguments[0], str))
    return Record("torch.Generator")


def _reconstructed(arguments: PickledItems) -> object:
    """Protocols 0 and 1 make objects by ``copyreg._reconstructor(class, object, None)``."""
    needs("copyreg._reconstructor", len(arguments) == 3 and isinstance(arguments[0], Symbol))
    needs("copyreg._reconstructor", isinstance(arguments[1], Symbol) and arguments[1].about == "object")
    needs("copyreg._reconstructor", arguments[2] is None and arguments[0].about == "record")
    return arguments[0].make([])


def _value(name: str) -> Callable[[list[object]], object]:
    def make(arguments: list[object]) -> object:
        needs(name, len(arguments) == 1 and isinstance(arguments[0], (int, str)))
        return arguments[0]

    return make


# -------------------------------------------------------------------------------------------------- list


_BUILTINS = ("builtins", "__builtin__")
_NUMPY_ARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")
# Modules -> names -> what a call makes, None where the name stands for a type only -> what the name is about.
_TABLE: tuple[tuple[Sequence[str], Sequence[str], Callable[[PickledItems], object] | None, str], ...] = (
    *((("torch", "torch.cuda"), (f"{legacy}Storage",), None, dtype) for legacy, dtype in _LEGACY_STORAGES.items()),
    (("torch", "torch.storage"), ("UntypedStorage",), None, "uint8"),
    (("torch._utils",), ("_rebuild_tensor", "_rebuild_tensor_v2"), _tensor_v2, "rebuild"),
    (("torch._utils",), ("_rebuild_tensor_v3",), _tensor_v3, "rebuild"),
    (("torch._utils",), ("_rebuild_parameter", "_rebuild_parameter_with_state"), _parameter, "rebuild"),
    (("torch._tensor",), ("_rebuild_from_type_v2",), _tensor_of_type, ""),
    (("torch",), ("Tensor",), None, "tensor type"),
    (("torch.nn.parameter",), ("Parameter", "Buffer"), None, "tensor type"),
    (("torch._C",), ("Generator",), _generator, ""),
    (("torch",), ("Size",), _size, ""),
    (("torch",), ("device",), _joining("torch.device", ":"), ""),
    (("torch.serialization",), ("_get_layout",), _joining("torch.layout", ""), ""),
    *((("pathlib", "pathlib._local"), (path,), _joining(path, "/"), "") for path in _PATHS),
    (("collections",), ("OrderedDict", "defaultdict"), _mapping, ""),
    (("collections",), ("Counter",), _counter, ""),
    (("collections",), ("deque",), _items("deque"), ""),
    *((_BUILTINS, (kind,), _items(kind), "") for kind in ("set", "frozenset", "list", "tuple")),
    # As the factory of a defaultdict.
    (_BUILTINS, ("int", "float"), None, ""),
    (_BUILTINS, ("dict",), _mapping, ""),
    (_BUILTINS, ("bytes", "bytearray"), _bytes, ""),
    (_BUILTINS, ("object",), None, "object"),
    (("_codecs",), ("encode",), _encoded, ""),
    (("copyreg", "copy_reg"), ("_reconstructor",), _reconstructed, ""),
    (_NUMPY_ARRAYS, ("_reconstruct",), empty_array, ""),
    (_NUMPY_ARRAYS, ("scalar",), scalar, ""),
    (("numpy.core.numeric", "numpy._core.numeric"), ("_frombuffer",), array_of_buffer, ""),
    (("numpy",), ("ndarray",), None, "array type"),
    (("numpy",), ("dtype",), array_type, ""),
    *(
        ((module,), (name,), _record(f"{module}.{name}"), "record")
        for module, names in _RECORDS.items()
        for name in names
    ),
    *(((module,), (name,), _value(name), "") for module, names in _ENUMERATIONS.items() for name in names),
)  # fmt: skip
_ALLOWED: dict[tuple[str, str], Symbol | TorchDtype] = {
    **{("torch", dtype): TorchDtype(dtype) for dtype in ITEM_BYTES},
    **{
        (module, name): Symbol(f"{module}.{name}", make or _constant(f"{module}.{name}"), about)
        for modules, names, make, about in _TABLE
        for module in modules
        for name in names
    },
}
