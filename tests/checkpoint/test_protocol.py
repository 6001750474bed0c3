"""The collectives of a save and of a load are those that ``save.py`` and ``load.py`` list, in their order."""

from __future__ import annotations

import ast
import sys
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import lockstep
from lockstep import Accelerator
from lockstep.comm import CommCounter, Communicator

CHECKPOINT = Path(lockstep.__file__).parent / "checkpoint"
RECORDS = {"error_barrier": 1, "gather_alike": 1, "gather_object": 3}
"""Collectives of torch in one call: the ranks' intentions, and for objects their sizes and pickles."""
Call = tuple[str, str, int]


class Calls:
    """What a communicator is asked for, and from which line of which file."""

    def __init__(self) -> None:
        self.seen: list[Call] = []
        self._exits = ExitStack()

    def __enter__(self) -> Calls:
        for name in RECORDS:
            self._exits.enter_context(mock.patch.object(Communicator, name, self._noted(name)))
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    def _noted(self, name: str) -> Any:
        original = getattr(Communicator, name)

        def method(communicator: Communicator, *args: Any) -> Any:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and Path(frame.f_code.co_filename).name in (
                "collectives.py",
                "contextlib.py",
            ):
                frame = frame.f_back
            assert frame is not None
            self.seen.append((name, Path(frame.f_code.co_filename).name, frame.f_lineno))
            return original(communicator, *args)

        return method


def calls(parallel: str, directory: str) -> dict[str, tuple[list[Call], int]]:
    """What each save and load asks for, and how many collectives of torch it makes."""
    accelerator = Accelerator(cpu=True, parallel=parallel)
    model = nn.Sequential()
    model.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    found: dict[str, tuple[list[Call], int]] = {}

    def note(kind: str, action: Any) -> None:
        with Calls() as made, CommCounter() as counter:
            action()
            accelerator._checkpointer.wait()
        found[kind] = made.seen, counter.count()

    note("first", lambda: accelerator.save_state(directory))
    note("replaces", lambda: accelerator.save_state(directory))
    note("load", lambda: accelerator.load_state(directory))
    return found


@pytest.mark.parametrize("parallel", ["zero=3", "pp=2"])
def test_every_collective_stands_in_its_order_in_one_file(
    run_distributed: Any, tmp_path: Path, parallel: str
) -> None:
    ranks = run_distributed(calls, 2, parallel, str(tmp_path / "state"))
    for kind, (seen, count) in ranks[0].items():
        assert all(other[kind][0] == seen for other in ranks), f"{kind}: ranks differ"
        assert {file for _, file, _ in seen} == {"load.py" if kind == "load" else "save.py"}
        lines = [line for _, _, line in seen]
        assert lines == sorted(set(lines)), kind
        assert count == sum(RECORDS[name] for name, _, _ in seen), kind
    first, again = (len(ranks[0][kind][0]) for kind in ("first", "replaces"))
    # The first one makes a plan, the second verifies and removes what it has replaced.
    assert again == first - 2 + 2
    sent = {"zero=3": 0, "pp=2": 1}[parallel]  # stages have other documents
    assert [name for name, _, _ in ranks[0]["load"][0]].count("gather_object") == 2 + sent
    assert [name for name, _, _ in ranks[0]["first"][0]].count("gather_object") == 6 + sent


def test_what_is_called_in_between_holds_no_collective() -> None:
    beneath = [path for folder in (".", "format", "store") for path in (CHECKPOINT / folder).glob("*.py")]
    assert len(beneath) > 20
    for path in beneath:
        if path.name in ("save.py", "load.py", "in_memory.py"):
            continue
        names = {
            node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
        }
        imported = {
            alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        assert not (names | imported) & {
            "raise_on_all_ranks",
            "gather_object",
            "error_barrier",
            "barrier",
            "new_group",
            "exchange_bytes",
        }
        assert "whole" not in imported
        assert "torch.distributed" not in path.read_text().replace("torch.distributed.tensor", ""), path
