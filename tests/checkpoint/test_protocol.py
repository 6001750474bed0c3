"""The collectives of a save and of a load are those that ``save.py`` and ``load.py`` list, in their order."""

from __future__ import annotations

import ast
import sys
import threading
from collections import Counter
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
from lockstep.checkpoint import plan_files, save_checkpoint
from lockstep.comm import CommCounter, Communicator
from tests.patching import module_of

CHECKPOINT = Path(lockstep.__file__).parent / "checkpoint"
COLLECTIVES = (
    *("raise_on_all_ranks", "gather_alike", "gather_object", "whole", "gloo_communicator"),
    *("open_window", "exchange_bytes", "plan_files", "write_checkpoint"),
)
RECORDS = {"error_barrier": 1, "gather_alike": 1, "gather_object": 3}
"""Collectives of torch in one call: the ranks' intentions, and for objects their sizes and pickles."""
AT_ONCE = {"error_barrier": 1, "gather_alike": 1}
"""What a later save in the background asks for before it returns."""

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


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def calls(parallel: str, directory: str) -> dict[str, tuple[list[Call], int]]:
    """What each save and load asks for, and how many collectives of torch it makes."""
    accelerator = Accelerator(cpu=True, parallel=parallel)
    model = Net()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    found: dict[str, tuple[list[Call], int]] = {}
    release = threading.Event()

    def plan_later(*args: Any) -> Any:
        release.wait()
        return plan_files(*args)

    def note(kind: str, action: Any) -> None:
        with Calls() as made, CommCounter() as counter:
            action()
            accelerator._checkpointer.wait()
        found[kind] = made.seen, counter.count()

    note("first", lambda: accelerator.save_state(directory))
    note("replaces", lambda: accelerator.save_state(directory))
    note("background", lambda: accelerator.save_state(directory, blocking=False))
    with (
        mock.patch.object(module_of(save_checkpoint), "plan_files", plan_later),
        Calls() as made,
        CommCounter() as counter,
    ):
        accelerator.save_state(directory, blocking=False)
        found["returned"] = list(made.seen), counter.count()
        release.set()
        accelerator._checkpointer.wait()
    note("load", lambda: accelerator.load_state(directory))
    if parallel.startswith("zero"):
        accelerator.register_save_state_pre_hook(lambda models, weights, place: None)
        note("hook", lambda: accelerator.save_state(directory))
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
        # Of the others some are made elsewhere: by a thread, or of weights.
        if kind in ("first", "replaces", "load", "returned"):
            assert count == sum(RECORDS[name] for name, _, _ in seen), kind
    first, again = (len(ranks[0][kind][0]) for kind in ("first", "replaces"))
    # The first one makes a plan, the second verifies and removes what it has replaced.
    assert again == first - 2 + 2
    assert Counter(name for name, _, _ in ranks[0]["returned"][0]) == AT_ONCE
    sent = {"zero=3": 0, "pp=2": 1}[parallel]  # stages have other documents
    assert [name for name, _, _ in ranks[0]["load"][0]].count("gather_object") == 2 + sent
    assert [name for name, _, _ in ranks[0]["first"][0]].count("gather_object") == 6 + sent


def listed(file: str) -> dict[int, str]:
    """The calls in a file that are collectives, by line."""
    found = {}
    for node in ast.walk(ast.parse((CHECKPOINT / file).read_text())):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in COLLECTIVES:
                found[node.lineno] = name
    return found


@pytest.mark.parametrize(("file", "least"), [("save.py", 22), ("load.py", 13), ("in_memory.py", 15)])
def test_each_collective_stands_below_a_line_that_says_what_travels(file: str, least: int) -> None:
    lines = (CHECKPOINT / file).read_text().splitlines()
    found = listed(file)
    assert len(found) >= least
    for number, name in found.items():
        paragraph = "\n".join(lines[:number]).rpartition("\n\n")[2]
        assert "  # " in paragraph or name in ("plan_files", "write_checkpoint"), f"{file}:{number}"


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
