"""Modules that compute the same, so that what was found of one of them holds for the others.

Two modules are alike if they consist of modules of the same classes that hold the same, as far as it was looked at:
tensors count by shape and type, buffers by value too, and a plain attribute only if something has read it, so that
the number of a layer does not tell layers apart that do not use it. What is not understood is like nothing else.
"""

from __future__ import annotations

import copy
import enum
import inspect
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals.fake import FakeTensor

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_NAMED = (type, types.ModuleType, types.BuiltinFunctionType, torch.dtype, torch.device, enum.Enum)
_CONTAINERS = (list, tuple, dict, OrderedDict, deque, set, frozenset, torch.Size)
_MOST_VALUES = 1 << 22
_ANY = "__dict__"
"""Reading this may be reading all attributes."""
_HEAP_TYPE = 1 << 9
"""Of a class's flags: it was made by Python code."""
_READS = (nn.Module.__module__, copy.__name__, inspect.__name__, "copyreg", "lockstep.")
"""Modules whose reading of an object's dictionary does not mean that what it holds matters."""

Reads = set[tuple[type, str]]

T = TypeVar("T")


@dataclass(frozen=True)
class Description:
    """Of a module. ``values``: its plain attributes by class, module inside and name."""

    structure: Hashable
    values: dict[tuple[type, str, str], object]

    def read(self, reads: Reads) -> dict[tuple[type, str, str], object]:
        """Return the plain attributes that were read."""
        classes = {cls for cls, name in reads if name == _ANY}
        return {k: v for k, v in self.values.items() if k[0] in classes or (k[0], k[2]) in reads}


class Unlike:
    """Equal to itself alone."""


def describe(module: nn.Module, foreign: Callable[[Tensor], bool] = lambda _: False) -> Description:
    """``foreign``: tensors that make a module like no other."""
    reader = _StructureKeys(foreign)
    values: dict[tuple[type, str, str], object] = {}
    parts: list[Hashable] = []
    for path, inner in module.named_modules(remove_duplicate=False):
        description: list[object] = [path, type(inner)]
        # That the same module stands in two places is part of the structure.
        if id(inner) in reader.seen:
            parts.append((*description, reader.seen[id(inner)]))
            continue
        reader.note(inner)
        for name, parameter in torch_modules.parameters_of(inner).items():
            description.append(
                (name, None if parameter is None else reader.tensor(parameter, has_values=False))
            )
        description += [
            (name, reader.key_of(buffer)) for name, buffer in torch_modules.buffers_of(inner).items()
        ]
        for name, value in vars(inner).items():
            if name in torch_modules.REGISTRIES:
                continue
            # A hook may do anything.
            if "hooks" in name and name in torch_modules.OWN_ATTRIBUTES:
                description.append(Unlike() if value else name)
            elif type(value) in _NUMBERS and name not in torch_modules.OWN_ATTRIBUTES:
                values[type(inner), path, name] = (type(value), repr(value))
                description.append(name)
            else:
                description.append((name, reader.key_of(value)))
        parts.append(tuple(description))
    return Description(tuple(parts), values)


def described(value: object, foreign: Callable[[Tensor], bool] = lambda _: False) -> Hashable:
    """Equal for values that hold the same; what is not understood is equal to nothing."""
    return _StructureKeys(foreign).key_of(value)


class _StructureKeys:
    def __init__(self, foreign: Callable[[Tensor], bool]) -> None:
        self.seen: dict[int, int] = {}
        self._alive: list[object] = []
        self._foreign = foreign

    def note(self, value: object) -> None:
        self.seen[id(value)] = len(self.seen)
        # Alive, so that no other object gets its id.
        self._alive.append(value)

    def key_of(self, value: Any) -> Hashable:
        cls = type(value)
        if cls in _NUMBERS:
            # By its text: NaN is like NaN, and 0.0 is not like -0.0.
            return cls, repr(value)
        if isinstance(value, _NAMED):
            return value
        if cls is types.FunctionType:
            # A closure or a default may hold anything.
            return value if not value.__closure__ and not value.__defaults__ else Unlike()
        if id(value) in self.seen:
            return "again", self.seen[id(value)]
        self.note(value)
        if isinstance(value, Tensor):
            return self.tensor(value, has_values=not isinstance(value, nn.Parameter))
        if cls in (set, frozenset):
            return cls, frozenset(map(self.key_of, value))
        if cls in (dict, OrderedDict):
            return cls, tuple((self.key_of(key), self.key_of(one)) for key, one in value.items())
        if cls in _CONTAINERS:
            return cls, tuple(map(self.key_of, value))
        attributes = getattr(value, "__dict__", None)
        if (
            isinstance(value, nn.Module)
            or callable(value)
            or not isinstance(attributes, dict)
            or not _is_plain(cls)
        ):
            return Unlike()
        return cls, tuple((key, self.key_of(one)) for key, one in attributes.items())

    def tensor(self, tensor: Tensor, has_values: bool) -> Hashable:
        # The number tells which tensors are one and the same.
        number = self.seen.setdefault(id(tensor), len(self.seen))
        self._alive.append(tensor)
        if self._foreign(tensor) or tensor.layout is not torch.strided:
            return Unlike()
        kind = (type(tensor), number, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if not has_values or tensor.is_meta or isinstance(tensor, FakeTensor):
            return (*kind, tensor.requires_grad)
        if type(tensor) is not Tensor or tensor.numel() > _MOST_VALUES or not _has_values(tensor):
            return Unlike()
        # numpy would pin the memory itself.
        copied = tensor.detach().clone().cpu().contiguous().reshape(-1)
        values = copied.view(torch.uint8).numpy().tobytes()
        return (*kind, tensor.requires_grad, values)


def _has_values(tensor: Tensor) -> bool:
    """Not so where the memory was let go, as ``fully_shard`` does with gathered weights: to read them would crash."""
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0


def _is_plain(cls: type) -> bool:
    """Whether instances hold nothing but attributes."""
    return all(
        one is object or (one.__flags__ & _HEAP_TYPE and not one.__dict__.get("__slots__"))
        for one in cls.__mro__
    )


@contextmanager
def reading(classes: Iterable[type]) -> Iterator[Reads]:
    """Note the attributes that are read inside of instances of these classes."""
    reads: Reads = set()
    with ExitStack() as stack:
        originals = {cls: cls.__getattribute__ for cls in dict.fromkeys(classes)}
        for cls, original in originals.items():
            own = "__getattribute__" in vars(cls)
            setattr(cls, "__getattribute__", _noting(original, reads))  # noqa: B010 - mypy knows no such assignment
            stack.callback(_put_back, cls, original if own else None)
        yield reads


def _noting(original: Callable[..., object], reads: Reads) -> object:
    def __getattribute__(self: object, name: str) -> object:
        if name != _ANY or not sys._getframe(1).f_globals.get("__name__", "").startswith(_READS):
            reads.add((type(self), name))
        return original(self, name)

    return __getattribute__


def _put_back(cls: type, original: object) -> None:
    if original is None:
        delattr(cls, "__getattribute__")
    else:
        setattr(cls, "__getattribute__", original)  # noqa: B010
