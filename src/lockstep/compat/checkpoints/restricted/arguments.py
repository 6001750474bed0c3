"""A name that a pickle may call, and checks of what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .nodes import Items, RefusedFile


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
