"""The size of the source in statements, which formatting cannot change: growth is paid for elsewhere."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import lockstep

SOURCE = Path(lockstep.__file__).parent
# Packages -> (statements at most, the aim). A change that makes a group smaller lowers its first number.
GROUPS: dict[tuple[str, ...], tuple[int, int]] = {
    ("parallel",): (8_640, 7_600),
    ("verify", "script", "testing"): (4_430, 3_600),
    ("offload",): (4_415, 3_900),
    ("checkpoint",): (4_400, 3_800),
    ("observe", "history", "report"): (5_155, 4_700),
    ("launch", "control"): (3_905, 3_700),
    ("compat", "utils", "cli", "."): (6_000, 5_300),
    ("config", "preparation", "train", "runtime", "comm", "data", "model", "torch_internals"): (
        11_320,
        10_200,
    ),
    ("plan", "tune", "replay", "shared_memory"): (3_800, 3_700),
}
ALL, FILES = (52_045, 46_500), (624, 460)


def statements(path: Path) -> int:
    """All statements but docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    texts = sum(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for node in nodes
    )
    return sum(isinstance(node, ast.stmt) for node in nodes) - texts


def test_no_package_grows_past_its_row() -> None:
    sizes: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).parts
        sizes[parts[0] if len(parts) > 1 else "."] += statements(path)
    rows = {group: sum(sizes[package] for package in group) for group in GROUPS}
    grown = {group: (size, GROUPS[group][0]) for group, size in rows.items() if size > GROUPS[group][0]}
    assert grown == {}, "statements now, and at most"
    assert sum(sizes.values()) == sum(rows.values()) <= ALL[0], "each package has a row"
    assert len(list(SOURCE.rglob("*.py"))) <= FILES[0]
