"""What a docstring of a public name tells: its arguments, shapes of tensors, what it raises, in plain English."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from functools import cached_property
from typing import Any

from tests.docstring_examples import EXAMPLE, methods_of, public_values
from tests.site.plain_english import riddles, sentences, words

MOST_WORDS = 35
OF_TENSORS = re.compile(r"\b(?:Tensor|Tree)\b")
CALLABLE = re.compile(r"Callable\[.*\]", re.DOTALL)
"""What a function takes and returns is not what an argument is."""
SHAPE = re.compile(r"\[[^\]`]*\]|\b0-d\b|\bshapes?\b")
ENTRY = r"^(?P<indent> *)(?:- ``)?\*{{0,2}}{name}(?:``)?: (?:.*(?:\n(?P=indent) +\S.*)*)"
"""Of an argument: its line in ``Args``, or in a list of fields, and the lines that continue it."""
SECTION = re.compile(r"^(?:Args|Attributes|Raises|Returns|Yields):$", re.MULTILINE)


def everything() -> dict[str, Any]:
    """Address -> value of public functions and classes, with their methods and properties."""
    found = {}
    for path, value in public_values().items():
        found[path] = value
        if inspect.isclass(value):
            found |= {
                f"{path}.{name}": one for name, one in (methods_of(value) | properties_of(value)).items()
            }
    return found


def properties_of(kind: type) -> dict[str, Any]:
    """The functions of the public properties of a class that this package defines."""
    values = {name: inspect.getattr_static(kind, name) for name in dir(kind) if name[0] != "_"}
    getters = {
        name: value.fget if isinstance(value, property) else value.func
        for name, value in values.items()
        if isinstance(value, (property, cached_property))
    }
    return {name: one for name, one in getters.items() if one.__module__.startswith("lockstep")}


def docstring(value: Any) -> str:
    """Its own docstring, without the example."""
    text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    return inspect.cleandoc(EXAMPLE.sub("", text or ""))


def parameters(value: Any) -> list[inspect.Parameter]:
    """What a caller may pass. Enums are not called, and of a class only a constructor of its own counts."""
    if inspect.isclass(value) and (issubclass(value, Enum) or "__init__" not in vars(value)):
        return []
    found = inspect.signature(value).parameters
    return [one for name, one in found.items() if name not in ("self", "cls") and name[0] != "_"]


def entry(text: str, name: str) -> str | None:
    """The lines of a docstring about one argument."""
    found = re.search(ENTRY.format(name=name), text, re.MULTILINE)
    return None if found is None else found[0]


def unnamed(value: Any, around: str = "") -> list[str]:
    """Arguments that neither the docstring nor ``around``, that of its class, names: as code, or in an entry."""
    text = f"{docstring(value)}\n\n{around}"
    return [
        one.name
        for one in parameters(value)
        if entry(text, one.name) is None and not re.search(rf"``[^`]*\b{one.name}\b[^`]*``", text)
    ]


def without_shape(value: Any) -> list[str]:
    """Arguments with tensors of which their entry, or without one the whole text, tells no shape."""
    text = docstring(value)
    return [
        one.name
        for one in parameters(value)
        if OF_TENSORS.search(CALLABLE.sub("", str(one.annotation)))
        and not SHAPE.search(entry(text, one.name) or text)
    ]


def raised(value: Any) -> set[type[BaseException]]:
    """The exceptions in ``raise`` statements of a function itself, or of the constructor of a class."""
    if inspect.isclass(value):
        own = [vars(value)[name] for name in ("__init__", "__post_init__") if name in vars(value)]
        return {kind for one in own for kind in raised(one)}
    function = inspect.unwrap(value)
    if function.__code__.co_filename.startswith("<"):  # the constructor of a dataclass
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    known = vars(builtins) | function.__globals__
    return {known[name] for name in raised_names(tree.body[0]) if name in known} - {NotImplementedError}


def raised_names(function: ast.AST) -> Iterator[str]:
    """What a function raises, without the functions inside of it."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield ast.unparse(node.exc.func)
        elif not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            yield from raised_names(node)


def unnamed_exceptions(value: Any) -> list[str]:
    """Exceptions that it raises itself, and of which the docstring names neither the class nor a base."""
    documented = set(re.findall(r"\w+", docstring(value)))
    return sorted(
        kind.__name__
        for kind in raised(value)
        if not documented
        & {base.__name__ for base in kind.__mro__ if base not in (Exception, BaseException, object)}
    )


def prose(value: Any) -> str:
    """The docstring as a page: sections have no title, and each entry is a paragraph."""
    text = re.sub(r"^ +(?=\S)", "", SECTION.sub("", docstring(value)), flags=re.MULTILINE)
    return re.sub(r"^(\*{0,2}[\w, .]+): ", "\n", text, flags=re.MULTILINE)


def hard_to_read(value: Any) -> list[str]:
    """Phrases that must be read twice, and sentences that are too long."""
    text = prose(value)
    return [*riddles(text), *(one for one in sentences(text) if words(one) > MOST_WORDS)]
