"""What a docstring of a public name has to say: its arguments, shapes of tensors, what it raises, in plain English."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from typing import Any

import lockstep.utils
from lockstep.compat.accelerate.interface import GATHERING, names
from tests.docstring_examples import EXAMPLE, methods_of, public_values
from tests.site.plain_english import riddles, sentences, words

MOST_WORDS = 35
OF_TENSORS = re.compile(r"\b(Tensor|Tree)\b")
NO_DATA = re.compile(r"Callable\[.*\]", re.DOTALL)
"""Functions of tensors: what they take stands in their own line, not in a shape."""
SHAPE = re.compile(r"\[[^\]`]*\]|\b0-d\b|\bshapes?\b|\bTensor`` of (?:the|that)\b")
ENTRY = r"^ *(?:- )?`*\*{{0,2}}{name}`*:"
SECTION = re.compile(r"^(?:Args|Attributes|Raises|Returns|Yields):$", re.MULTILINE)


def everything() -> dict[str, Any]:
    """Address -> value of all public functions and classes, and of their methods."""
    values = dict(public_values())
    for name in sorted(names(GATHERING)):
        value = getattr(lockstep.utils, name)
        is_ours = str(getattr(value, "__module__", "")).startswith("lockstep")
        if callable(value) and is_ours and not any(value is known for known in values.values()):
            values[f"lockstep.utils.{name}"] = value
    found = {}
    for path, value in values.items():
        found[path] = value
        if inspect.isclass(value):
            found |= {f"{path}.{name}": method for name, method in methods_of(value).items()}
    return found


def docstring(value: Any) -> str:
    """Its own docstring, without the example."""
    own = value.__doc__ if not inspect.isclass(value) else vars(value).get("__doc__")
    return inspect.cleandoc(EXAMPLE.sub("", own or ""))


def parameters(value: Any) -> list[inspect.Parameter]:
    """Those that a caller may pass. Members of enums, and exceptions without a constructor, are not called."""
    if inspect.isclass(value) and (issubclass(value, Enum) or "__init__" not in vars(value)):
        return []
    try:
        signature = inspect.signature(value)
    except ValueError:
        return []
    return [
        one for name, one in signature.parameters.items() if name not in ("self", "cls") and name[0] != "_"
    ]


def unnamed_parameters(value: Any, around: str = "") -> list[str]:
    """Parameters that neither the docstring nor that of its class names, as code or as an entry."""
    text = f"{docstring(value)}\n{around}"
    return [
        one.name
        for one in parameters(value)
        if not re.search(rf"``[^`]*\b{one.name}\b[^`]*``", text)
        and not re.search(ENTRY.format(name=one.name), text, re.MULTILINE)
    ]


def shapeless_tensors(value: Any) -> list[str]:
    """Parameters that are tensors, and of which neither their entry nor else the text has a shape."""
    text = docstring(value)
    found = []
    for one in parameters(value):
        if OF_TENSORS.search(NO_DATA.sub("", str(one.annotation))):
            entry = re.search(
                ENTRY.format(name=one.name)
                + r".*(?:\n +[^\n]*)*?(?=\n *(?:- |\*{0,2}\w+: )|\n\n|\Z)".replace("{", "{").replace(
                    "}", "}"
                ),
                text,
                re.MULTILINE,
            )
            if not SHAPE.search(entry[0] if entry else text):
                found.append(one.name)
    return found


def raised(value: Any) -> set[type[BaseException]]:
    """Classes of exceptions in ``raise`` statements of a function's own body, or of a class's constructor."""
    if inspect.isclass(value):
        own = [vars(value)[name] for name in ("__init__", "__post_init__") if name in vars(value)]
        return set().union(*map(raised, own)) if own else set()
    function = inspect.unwrap(value)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return set()
    known = {
        **vars(__builtins__ if not isinstance(__builtins__, dict) else inspect.getmodule(int)),
        **getattr(function, "__globals__", {}),
    }
    kinds = {known.get(node.func.id) for node in _raises(tree.body[0]) if isinstance(node.func, ast.Name)}
    return {kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, BaseException)}


def _raises(function: ast.AST) -> Iterator[ast.Call]:
    """What is raised in it, without the functions inside of it."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield node.exc
        elif not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            yield from _raises(node)


def unnamed_exceptions(value: Any) -> list[str]:
    """Exceptions that it raises itself, and of which the docstring names neither the class nor a base."""
    said = set(re.findall(r"\w+", docstring(value)))
    kinds = raised(value) - {NotImplementedError}
    return sorted(kind.__name__ for kind in kinds if not said & {base.__name__ for base in kind.__mro__[:-2]})


def prose(value: Any) -> str:
    """The docstring as a page: each entry of a section is a paragraph."""
    text = SECTION.sub("", docstring(value))
    text = re.sub(r"^ +(?=\S)", "", text, flags=re.MULTILINE)
    return re.sub(r"^(\*{0,2}[\w, ]+): ", r"\n", text, flags=re.MULTILINE)


def hard_to_read(value: Any) -> list[str]:
    """Phrases that must be read twice, and sentences that are too long."""
    text = prose(value)
    return [*riddles(text), *(one for one in sentences(text) if words(one) > MOST_WORDS)]
