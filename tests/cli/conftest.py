"""Fixtures of the tests of commands."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_user_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the user's own file would be; nothing is set by whoever runs the tests."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    for name in ("LOCKSTEP_CONFIG_FILE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "user" / "lockstep" / "config.yaml"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """An empty one."""
    path = tmp_path / "train.py"
    path.touch()
    return path
