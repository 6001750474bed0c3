"""What a pickle describes, as inert values: nothing here can be called into doing anything.

A pickle may call the names of a list, and what it calls them with is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

PickledItems: TypeAlias = list[Any]
"""What a pickle calls a name with, or fills an object with: checked where it is used."""


class RefusedFile(Exception):
    """A file holds something that is not read; the text says what."""


class Damaged(RefusedFile):
    """A file is not whole, or contradicts itself."""


@dataclass(eq=False)
class Mapping:
    """A dict as its pairs: keys of a hostile file are never hashed here."""

    pairs: list[tuple[object, object]] = field(default_factory=list)
    # A collections.Counter.
    counts: bool = False


@dataclass(eq=False)
class Items:
    """A tuple, set, frozenset or deque."""

    kind: str
    items: PickledItems


@dataclass(eq=False)
class Storage:
    """Bytes of a file: ``nbytes`` from ``start``. A legacy file says where only at its end."""

    dtype: str
    nbytes: int
    key: str
    start: int = -1
    crc32: int | None = None


LAZY = ("conj", "neg")


@dataclass(eq=False)
class Tensor:
    """A strided view of a storage; offset and strides count elements. ``lazy`` words of ``LAZY`` are to be done."""

    storage: Storage
    dtype: str
    offset: int
    shape: list[int]
    stride: list[int]
    lazy: list[str] = field(default_factory=list)


@dataclass(eq=False)
class ArrayType:
    """A NumPy dtype: kind and size, then the byte order by BUILD."""

    code: str
    order: str = "="


@dataclass(eq=False)
class Array:
    """A NumPy array; ``BUILD`` fills it."""

    dtype: str = ""
    shape: list[int] = field(default_factory=list)
    data: bytes = b""
    fortran: bool = False


@dataclass(eq=False)
class Record:
    """An object of a class that is known by name only, with the state it was pickled with."""

    name: str
    state: object = None
    built: bool = False


@dataclass(frozen=True)
class TorchDtype:
    """A torch.dtype."""

    dtype: str


@dataclass(frozen=True)
class Symbol:
    """A name of the list. ``make`` is what calling it does; ``about`` is what it stands for, if not called."""

    name: str
    make: Callable[[list[object]], object]
    about: str = ""


def needs(name: str, holds: bool) -> None:
    """Raise RefusedFile, with the name that is called, unless ``holds``."""
    if not holds:
        raise RefusedFile(f"its pickle calls {name} with arguments that torch, NumPy and Python never write")


def is_size(value: object) -> bool:
    """Whether it is a count: an integer, not negative."""
    return type(value) is int and value >= 0


def sizes(name: str, value: Any) -> list[int]:
    """The counts in a tuple. Raises RefusedFile for anything else."""
    needs(name, isinstance(value, Items) and value.kind == "tuple" and all(map(is_size, value.items)))
    return list(value.items)
