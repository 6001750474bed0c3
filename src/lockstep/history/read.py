"""A run's folder, or what there is of it: steps, events, and which checkpoints are still on disk.

Nothing that such a file may hold makes reading fail: a line that is cut or garbled is left out, what is missing is not
known, what is not known here is passed over.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.values import plain
from lockstep.errors import ConfigError
from lockstep.history.columns import ColumnReader, StepColumns
from lockstep.history.events import RunEvent, event_of, named
from lockstep.history.lines import EVENTS, MEASURES, json_lines, read_lines
from lockstep.words import plain_text

INNER = "run"
"""The folder of a project that holds a run's files."""
OF_A_PROJECT = re.compile(rf"{INNER}(\.[0-9]+)?")
"""This folder, and those of runs before it that were begun anew."""


@dataclass(frozen=True)
class RunHistory:
    """What a run's folder says. ``on_disk``: by the path of a checkpoint whether it is there; unknown ones are left
    out."""

    name: str
    path: Path
    steps: StepColumns
    events: tuple[RunEvent, ...]
    on_disk: Mapping[str, bool]

    @property
    def has_steps(self) -> bool:
        return len(self.steps) > 0


def read_run(path: str | Path, newest: int | None = None) -> RunHistory:
    """Read the folder of a run, or that of a project in which it is.

    Args:
        newest: Bytes of the newest steps that are read; None: all steps are.

    Raises:
        ConfigError: it holds neither of the two files.
    """
    folder = _run_folder(Path(path))
    reader = ColumnReader()
    for block in json_lines(folder / MEASURES, newest):
        reader.add(block)
    events = tuple(event for line in read_lines(folder / EVENTS) if (event := event_of(line)) is not None)
    return RunHistory(_name(folder), folder, reader.columns(), events, _on_disk(folder, events))


def has_files(folder: Path) -> bool:
    """Return whether it holds any of a run's files."""
    return any((folder / name).is_file() for name in (MEASURES, EVENTS))


def _run_folder(path: Path) -> Path:
    if path.name in (MEASURES, EVENTS) and path.is_file():
        return path.parent
    for folder in (path, path / INNER):
        if has_files(folder):
            return folder
    reason = "does not exist" if not os.path.lexists(path) else f"contains neither {MEASURES} nor {EVENTS}"
    raise ConfigError(
        f"'{plain(path, 200)}' {reason}. Give the folder of a run: <project_dir>/{INNER}, or the run_dir of the run."
    )


def _name(folder: Path) -> str:
    """Return the name by which people tell runs apart: ``gpt`` for ``runs/gpt/run``, ``gpt.1`` for
    ``runs/gpt/run.1``."""
    resolved = folder.resolve()
    name = resolved.name
    if OF_A_PROJECT.fullmatch(name):
        name = resolved.parent.name + name.removeprefix(INNER)
    return plain_text(name, 80) or INNER


def _on_disk(folder: Path, events: tuple[RunEvent, ...]) -> dict[str, bool]:
    found = {}
    for text in {event.text("path") for event in named(events, "checkpoint")} - {""}:
        named_path = Path(text)
        # A project that was moved has them beside its run.
        beside = folder.parent / "checkpoints" / named_path.name
        try:
            if (named_path.is_absolute() and named_path.is_dir()) or beside.is_dir():
                found[text] = True
            # Gone is said only where the folder of checkpoints is to be seen; on another machine none is.
            elif beside.parent.is_dir() or (named_path.is_absolute() and named_path.parent.parent.is_dir()):
                found[text] = False
        except (OSError, ValueError):
            # The name is too long, or has a NUL.
            continue
    return found
