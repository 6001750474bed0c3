"""Kill a run, or let the power fail, at every operation of its log, and load what is left.

One run is made; what a process that is killed leaves is what the operations before made of the folder. That a real kill
leaves the same is seen in ``crashes``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from checkpoint.crash.crashes import Allowed, Outcome, Written, check, folder_for, write
from checkpoint.crash.lost_writes import Disk, Tree
from checkpoint.crash.operations import Operation
from checkpoint.crash.subject import Scenario


@dataclass(frozen=True)
class Remains:
    """What may be left before operation ``number``, and the steps that are right to load."""

    tree: Tree
    number: int
    point: str
    allowed: Allowed


def remains(log: list[Operation], allowed: list[Allowed], first: int = 0) -> list[Remains]:
    """All different trees that may be left, from operation ``first`` on; ``allowed[i]`` before operation i."""
    disk = Disk()
    found: dict[tuple[frozenset[tuple[str, bytes | None]], Allowed], Remains] = {}
    for number in range(len(log) + 1):
        operation = log[number] if number < len(log) else None
        if number >= first:
            point = f"power off before operation {number}: {operation or 'the end'}"
            for tree in disk.after_power_failure():
                one = Remains(tree, number, point, allowed[number])
                found.setdefault((frozenset(tree.items()), one.allowed), one)
        if operation is not None:
            disk.do(operation)
    return list(found.values())


def after_kills(log: list[Operation], allowed: list[Allowed], first: int = 0) -> list[Remains]:
    """All different trees that a kill leaves, before an operation or in the middle of a write."""
    disk = Disk()
    found: dict[tuple[frozenset[tuple[str, bytes | None]], Allowed], Remains] = {}
    for number, operation in enumerate([*log, None]):
        point = f"killed before operation {number}: {operation or 'the end'}"
        for tree in _halves(disk, operation) if number >= first else ():
            one = Remains(tree, number, point, allowed[number])
            found.setdefault((frozenset(tree.items()), one.allowed), one)
        if operation is not None:
            disk.do(operation)
    return list(found.values())


def _halves(disk: Disk, operation: Operation | None) -> Iterator[Tree]:
    """The tree before an operation, and where it writes, with half of that."""
    tree = disk.tree()
    yield tree
    if (
        operation is not None
        and operation.kind == "write"
        and len(operation.data) > 1
        and not operation.failed
    ):
        content, half = tree[operation.path], operation.data[: len(operation.data) // 2]
        assert content is not None
        before = content[: operation.offset].ljust(operation.offset, b"\0")
        yield {**tree, operation.path: before + half + content[operation.offset + len(half) :]}


def after_one_kill(scenario: Scenario) -> list[Remains]:
    """A run that saves again and again is killed."""
    with folder_for() as folder:
        (written,) = write(folder, scenario)
        assert_model_is_right(written.log, folder)
    return after_kills(written.log, allowed_in(written))


def after_two_kills(scenario: Scenario, written: Written, first: Remains) -> list[Remains]:
    """The run that goes on with what the first kill left is killed, too."""
    with folder_for() as folder:
        _restore(first.tree, folder)
        (again,) = write(folder, scenario, saves=1, resume=True)
    assert again.loaded in first.allowed
    step, before = again.loaded + 1, [first.allowed] * first.number
    while_saving = frozenset([again.loaded, step])
    after = [while_saving if i < again.ends[0] else frozenset([step]) for i in range(len(again.log) + 1)]
    log = [*written.log[: first.number], *again.log]
    return [
        replace(one, point=f"{first.point}; then {one.point}")
        for one in after_kills(log, [*before, *after], first=first.number)
    ]


def allowed_in(written: Written) -> list[Allowed]:
    """Before each operation, and at the end."""
    found = []
    for number in range(len(written.log) + 1):
        returned = sum(number >= end for end in written.ends)
        found.append(frozenset([returned, min(returned + 1, len(written.ends))]))
    return found


def after_one_run(scenario: Scenario) -> list[Remains]:
    """The power fails in a run that saves again and again."""
    with folder_for() as folder:
        (written,) = write(folder, scenario)
        assert_model_is_right(written.log, folder)
    return remains(written.log, allowed_in(written))


def assert_model_is_right(log: list[Operation], folder: Path) -> None:
    """Where nothing is lost, the model has what the folder has."""
    disk = Disk()
    for operation in log:
        disk.do(operation)
    found: Tree = {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
    }
    assert disk.tree() == found


def load(scenario: Scenario, left: Remains) -> Outcome:
    """Write what is left in a folder, and load it."""
    with folder_for() as folder:
        _restore(left.tree, folder)
        return check(folder, scenario, left.allowed, left.point)


def _restore(tree: Tree, folder: Path) -> None:
    for path, content in sorted(tree.items()):
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)
