"""The public names with their arguments, the commands with their options, and the keys of a configuration file."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

from lockstep.config import IN_FILES
from tests.site import commands, names

OURS = (*names.WHOLE, "lockstep.errors")
ACCELERATES = names.IN_SENTENCES
"""Modules whose names are Accelerate's, in a file of their own."""


def of_modules(modules: Iterable[str]) -> dict[str, str]:
    """Return name -> what it is, for the modules from which users import, with the public members of our classes."""
    found = {}
    for module in map(importlib.import_module, modules):
        for name in names.public(module):
            if module.__name__ == "lockstep.errors" and not name.endswith("Error"):
                continue
            value, path = getattr(module, name), f"{module.__name__}.{name}"
            if not isinstance(value, type):
                found[path] = signature(value) if callable(value) else f"a {type(value).__name__}"
                continue
            found[path] = constructor(value)
            found |= {f"{path}.{member}": text for member, text in members(value)}
    return found


def of_commands() -> dict[str, str]:
    """Return the commands with their options, and the keys of a configuration file."""
    found = dict.fromkeys(IN_FILES, "key of a file")
    for words, command in commands.walk():
        found[f"lockstep {words}"] = "command"
        spellings = [spelling for option in commands.options_of(command) for spelling in option.opts]
        found |= {f"lockstep {words} {spelling}": "option" for spelling in spellings}
    return found


def is_ours(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").startswith("lockstep")


def constructor(kind: type) -> str:
    """Return its arguments, unless another library defines them."""
    if issubclass(kind, Enum):
        return "one of " + ", ".join(kind.__members__)
    owner = next(one for one in kind.__mro__ if "__init__" in vars(one))
    return f"class{signature(owner.__init__) if is_ours(owner) else '(...)'}"


def members(kind: type) -> Iterator[tuple[str, str]]:
    """Yield what one of our classes defines and does not keep private."""
    for name in dir(kind):
        owner = next((one for one in kind.__mro__ if name in vars(one)), None)
        if name.startswith("_") or not is_ours(owner) or name in getattr(kind, "__dataclass_fields__", ()):
            continue
        value = vars(owner)[name]
        function = getattr(value, "__func__", value)
        if isinstance(value, property):
            yield name, "property"
        elif inspect.isfunction(function):
            yield name, signature(function)
        elif not issubclass(kind, Enum):
            yield name, f"a {type(value).__name__}"


def signature(function: Any) -> str:
    """Return the arguments with their types, as the source spells them, and their defaults."""
    if not is_ours(function):
        return "(...)"
    parameters = [
        one.replace(
            annotation=one.annotation if isinstance(one.annotation, str) else one.empty,
            default=one.default if one.default is one.empty else Spelled(one.default),
        )
        for one in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(parameters)).replace("'", "")


class Spelled:
    """A default whose ``repr`` is the same in every process."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        value = self.value
        if isinstance(value, Enum):
            return str(value.name)
        if isinstance(value, (str, int, float, tuple, list, dict, type(None))):
            return repr(value)
        return getattr(value, "__name__", type(value).__name__)


FILES: dict[str, Callable[[], dict[str, str]]] = {
    "names": lambda: of_modules(OURS),
    "accelerate_names": lambda: of_modules(ACCELERATES),
    "commands": of_commands,
}
"""File -> what it has."""
