"""A name stands for one thing: no two classes share theirs, also not with a type alias or but for an underscore."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import lockstep

SOURCE = Path(lockstep.__file__).parent


def named_types(path: Path) -> Iterator[str]:
    """Classes, wherever they are defined, and what a module calls in capitals and small letters at its top."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        yield from (name for name in names if name.strip("_")[:1].isupper() and not name.isupper())


def test_no_two_classes_and_aliases_have_one_name() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for name in named_types(path):
            found[name.strip("_")].append(f"{path.relative_to(SOURCE)}: {name}")
    assert len(found) > 700
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
