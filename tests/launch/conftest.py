"""Launchers in this process take its signals: nothing else may listen to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.runtime import current_runtime, end_runtime
from tests.launch.fakes import Fakes


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Programs that take the places of ssh, srun, ... on PATH."""
    found = Fakes(tmp_path)
    monkeypatch.setenv("PATH", found.path)
    return found


@pytest.fixture(autouse=True)
def _no_run_from_before() -> None:
    """An ``Accelerator`` that a test left here would end the process at a signal that is meant for a launcher."""
    if current_runtime() is not None:
        end_runtime()
