"""Replays in this process: the command's own, but for the process."""

from __future__ import annotations

import contextlib
import runpy
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lockstep.observe import RunObserver
from lockstep.replay import ReplayedRun, ReplaySpec, ReplayVerdict, run_replay

SCRIPT = Path(__file__).with_name("training.py")


class _Over(BaseException):
    """The replay has ended."""


class ReplayHere(ReplayedRun):
    """Ends the script, and not this process."""

    def end(self) -> NoReturn:
        raise _Over


def run_script(*arguments: str) -> None:
    before, sys.argv = sys.argv, [str(SCRIPT), *arguments]
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        sys.argv = before


def capsule_in(run: Path) -> Path:
    """The only one."""
    (found,) = (run / "capsules").iterdir()
    return found


def replay_here(
    monkeypatch: pytest.MonkeyPatch, capsule: Path, *arguments: str, **spec: Any
) -> ReplayVerdict:
    run = ReplayHere(ReplaySpec(str(capsule), str(capsule / "verdict.json"), **spec))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", sys.argv)
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(RunObserver, "registered", [])
        with contextlib.suppress(_Over):
            run_replay(run, [str(SCRIPT), *arguments])
    return run.verdict()
