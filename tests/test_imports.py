"""Tests, benchmarks and examples import from packages, so that they stay as they are when a file of one moves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import lockstep

SOURCE = Path(lockstep.__file__).parent
ROOT = Path(__file__).parents[1]
FOLDERS = ("tests", "benchmarks", "examples")
IN_TEXT = re.compile(r"^\s*(?:from (lockstep[\w.]*) import ([\w, ]+)|import ([\w., ]+))", re.MULTILINE)
PATCHING = {"setattr", "delattr", "setitem", "patch", "object"}


def is_file_of_a_package(module: str) -> bool:
    """Whether it is one file below a package of ours. Those beside ``lockstep.errors`` are public."""
    top, *names = module.split(".")
    if top != "lockstep" or len(names) < 2:
        return False
    return SOURCE.joinpath(*names).with_suffix(".py").is_file()


def imported(module: str, names: Iterable[str]) -> Iterator[str]:
    """The modules of ``from module import names``, as far as they are modules."""
    yield module
    yield from (f"{module}.{name}" for name in names)


def modules_of(text: str) -> Iterator[str]:
    """What a source imports or patches by its path, also in the sources that its strings hold."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from imported(node.module, (alias.name for alias in node.names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for line in node.value.replace(";", "\n").splitlines():
                if (found := IN_TEXT.match(line)) and found[1]:
                    yield from imported(found[1], re.findall(r"\w+", found[2]))
                elif found:
                    yield from re.findall(r"lockstep[\w.]*", found[3])
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in PATCHING and node.args:
            names = str(getattr(node.args[0], "value", "")).split(".")
            yield from (".".join(names[:count]) for count in range(3, len(names)))


def files_of_packages(text: str) -> list[str]:
    return sorted({module for module in modules_of(text) if is_file_of_a_package(module)})


def test_nothing_is_imported_from_a_file_of_a_package() -> None:
    sources = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(sources) > 400
    found = {
        str(path.relative_to(ROOT)): files
        for path in sources
        if path != Path(__file__) and (files := files_of_packages(path.read_text(encoding="utf-8")))
    }
    assert found == {}, "Import from the package, and declare the name in its __init__.py."


@pytest.mark.parametrize(
    ("text", "files"),
    [
        ("from lockstep.config.values import bytes_of", ["lockstep.config.values"]),
        ("def f():\n    from lockstep.offload.files import direct", ["lockstep.offload.files.direct"]),
        ("import lockstep.launch.plan as plan", ["lockstep.launch.plan"]),
        ("code = 'import sys; from lockstep.cli.output import escape; escape(1)'", ["lockstep.cli.output"]),
        ("code = 'import sys, lockstep.cli.output as output; output.escape(1)'", ["lockstep.cli.output"]),
        ("patch.setattr('lockstep.launch.network.LOOPBACK', 1)", ["lockstep.launch.network"]),
        ("mock.patch('lockstep.checkpoint.store.local.os.write')", ["lockstep.checkpoint.store.local"]),
        ("from lockstep.cli.main import main", ["lockstep.cli.main"]),
        ("from lockstep.errors import UsageError\nfrom lockstep.cli import cli", []),
        ("from lockstep.parallel import zero\nfrom lockstep.parallel.zero import Sharding", []),
    ],
)
def test_each_way_to_import_a_file_is_found(text: str, files: list[str]) -> None:
    assert files_of_packages(text) == files


def declared(package: Path) -> dict[str, list[str]]:
    """Module -> names, as the ``__init__.py`` of a package declares them."""
    for node in ast.walk(ast.parse(package.joinpath("__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "names_of_modules":
            return ast.literal_eval(node.args[1])
    return {}


def defined(path: Path) -> set[str]:
    """What a module defines at its top."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.For | ast.If):
            stored = (part for part in ast.walk(node) if isinstance(part, ast.Name))
            found |= {name.id for name in stored if isinstance(name.ctx, ast.Store)}
    return found


def test_declared_names_exist_once_and_are_no_modules() -> None:
    """A name that a module of the package has too would be this module, once it is imported."""
    count = 0
    for package in sorted(path.parent for path in SOURCE.rglob("__init__.py")):
        names = [name for names in declared(package).values() for name in names]
        count += len(names)
        assert sorted(names) == sorted(set(names)), package
        assert {path.stem for path in package.iterdir()} & set(names) == set(), package
        for module, names in declared(package).items():
            path = package.joinpath(*module.split(".")).with_suffix(".py")
            assert set(names) - defined(path) == set(), path
    assert count > 500
