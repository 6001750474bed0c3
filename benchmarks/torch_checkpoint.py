"""The same kills of ``torch.distributed.checkpoint``, for comparison: into one directory, and into new ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from checkpoint.crash.crashes import Outcome, Point, folder_for, points_of
from checkpoint.crash.operations import Interposer, Kill, Operation
from checkpoint.crash.processes import Tell, run
from checkpoint.crash.subject import formula

SAVES = 2


@dataclass(frozen=True)
class Peer:
    """A way to save with torch; a row of the benchmark's table."""

    name: str
    in_place: bool

    @property
    def scenario(self) -> bool:
        return self.in_place

    @staticmethod
    def kind(in_place: bool, part: tuple[int, int]) -> list[Outcome]:
        """Killed at every so many-th point of the second save."""
        with folder_for() as folder:
            log, begins = _save(folder, in_place, None)
        points = points_of(log, first=begins)
        return [_crash(in_place, point, log) for point in points[part[1] :: part[0]]]


IN_PLACE = Peer("killed: torch.distributed.checkpoint, one directory", in_place=True)
NEW_DIRECTORIES = Peer("killed: torch.distributed.checkpoint, new directories", in_place=False)


def _state(step: int) -> dict[str, Any]:
    names = ("weight", "bias", "momentum.weight", "momentum.bias")
    tensors = {name: formula(step, name, torch.empty(4, 5)) for name in names}
    return {**tensors, "step": step}


def _directory(folder: Path, in_place: bool, step: int) -> Path:
    return folder / ("state" if in_place else f"state-{step}")


def _save(folder: Path, in_place: bool, point: Point | None) -> tuple[list[Operation], int]:
    """Save steps 1 and 2. Returns the operations, and how many of them were of step 1."""

    def stop(number: int, operation: Operation) -> Kill | None:
        return Kill(point.half) if point is not None and number == point.number else None

    def work(tell: Tell) -> None:
        interposer = Interposer(folder, stop)
        interposer.install()
        interposer.armed = True
        ends = []
        for step in range(1, SAVES + 1):
            writer = FileSystemWriter(_directory(folder, in_place, step), single_file_per_rank=False)
            save(_state(step), storage_writer=writer, no_dist=True)
            ends.append(len(interposer.log))
        tell((interposer.log, ends[0]))

    reported = run(work).reported
    return reported[0] if reported else ([], 0)


def _crash(in_place: bool, point: Point, log: list[Operation]) -> Outcome:
    def work(tell: Tell) -> None:
        failures = []
        for step in (SAVES, SAVES - 1):  # the newest directory that loads
            state = _state(0)
            try:
                load(state, checkpoint_id=_directory(folder, in_place, step), no_dist=True)
            except (Exception, CheckpointException) as error:  # the latter is no Exception
                failures.append(f"{type(error).__name__}: {error}")
                continue
            tell(_result(state))
            return
        tell(("unreadable", failures[0]))

    with folder_for() as folder:
        _save(folder, in_place, point)
        result, detail = run(work).reported[0]
    name = IN_PLACE.name if in_place else NEW_DIRECTORIES.name
    return Outcome(name, f"operation {point.number}: {log[point.number]}", result, detail)


def _result(state: dict[str, Any]) -> tuple[str, str]:
    for step, result in ((SAVES, "N"), (SAVES - 1, "N-1")):
        same = [torch.equal(value, state[name]) for name, value in _state(step).items() if name != "step"]
        if all(same) and state["step"] == step:
            return result, ""
    return "mixed", str(
        {name: value if name == "step" else float(value[0, 0]) for name, value in state.items()}
    )
