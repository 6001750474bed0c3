"""The imports at the top of a script: what can be done before the script begins, and changes nothing that it sees.

Up to the first line that is anything else, nothing but the imports themselves has an effect. So whoever has executed
them, in their order, with the same variables and the same path, has done what the script would do first.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

Import = ast.Import | ast.ImportFrom


@dataclass(frozen=True)
class Target:
    """What an interpreter runs: ``files`` in this order, after it has put ``first_path`` before ``sys.path``."""

    files: tuple[str, ...]
    first_path: str


@dataclass(frozen=True)
class Prologue:
    """Imports of libraries at the top of a program, and where they end: the file, its line, and what stands there."""

    imports: tuple[str, ...] = ()
    end: str = ""


def target_of(command: Sequence[str], interpreter: str, path: Sequence[str]) -> Target | None:
    """The files behind a command such as ``python train.py`` or ``python -m train``; None: another kind of command.

    Args:
        path: ``sys.path`` of the interpreter, without what it puts first for the command.
    """
    if not command or command[0] != interpreter or len(command) < 2:
        return None
    if command[1] == "-m":
        return _module(command[2], path) if len(command) > 2 else None
    if command[1].startswith("-") or not os.path.isfile(command[1]) or not command[1].endswith(".py"):
        return None
    return Target((command[1],), os.path.dirname(os.path.realpath(command[1])))


def _module(name: str, path: Sequence[str]) -> Target | None:
    here = os.getcwd()
    files: list[str] = []
    places: Sequence[str] | None = [here, *path]
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:count]), places)
        if spec is None:
            return None
        if spec.origin is not None and spec.has_location:
            files.append(spec.origin)
        places = spec.submodule_search_locations
        if places is None and count < len(parts):
            return None
    # A package, which is run by its __main__.
    if places is not None:
        main = PathFinder.find_spec(f"{name}.__main__", places)
        if main is None or main.origin is None:
            return None
        files.append(main.origin)
    return Target(tuple(files), here) if all(file.endswith(".py") for file in files) else None


def read_prologue(files: Sequence[str], is_library: Callable[[str], bool]) -> Prologue:
    """The imports with which these files begin, as source.

    Args:
        is_library: Whether a package of this name is installed, and no file of the user's.

    Raises:
        OSError, SyntaxError, ValueError: a file cannot be read.
    """
    imports: list[str] = []
    for file in files:
        for statement in ast.parse(Path(file).read_bytes(), file).body:
            if _does_nothing(statement):
                continue
            if not isinstance(statement, ast.Import | ast.ImportFrom) or not _of_libraries(
                statement, is_library
            ):
                return Prologue(tuple(imports), f"{Path(file).name} line {statement.lineno}")
            imports.append(ast.unparse(statement))
    return Prologue(tuple(imports))


def _of_libraries(statement: Import, is_library: Callable[[str], bool]) -> bool:
    if isinstance(statement, ast.Import):
        return all(is_library(alias.name.partition(".")[0]) for alias in statement.names)
    return not statement.level and is_library((statement.module or "").partition(".")[0])


def _does_nothing(statement: ast.stmt) -> bool:
    """A docstring, a constant, ``from __future__``, or what only type checkers read."""
    match statement:
        case ast.Expr(value=ast.Constant()) | ast.ImportFrom(module="__future__"):
            return True
        case ast.Assign(targets=targets, value=value):
            return all(isinstance(target, ast.Name) for target in targets) and _is_constant(value)
        case ast.AnnAssign(target=ast.Name(), annotation=ast.Name(), value=value):
            return value is None or _is_constant(value)
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=[]):
            return True
    return False


def _is_constant(value: ast.expr) -> bool:
    match value:
        case ast.Constant():
            return True
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return all(map(_is_constant, parts))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
            return True
    return False
