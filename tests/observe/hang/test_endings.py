"""Ranks that have ended: not blamed for being still, and named where others wait for them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.testing import free_port
from tests.command import LOCKSTEP

SCRIPT = Path(__file__).parent / "ending.py"
LAUNCH = [*LOCKSTEP, "launch", "--nproc", "2", "--cpu", "--hang-timeout", "1"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
LIMIT_S = 300


def start(launcher: str, how: str, out: Path) -> subprocess.Popen[str]:
    """``ending.py HOW``, by one of the launchers."""
    out.mkdir()
    command = LAUNCH if launcher == "ours" else [*TORCHRUN, str(free_port())]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP")}
    return subprocess.Popen(
        [*command, str(SCRIPT), how, str(out)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("launcher", "endings"),
    [
        ("ours", ("export", "save")),
        pytest.param("ours", ("exit", "collective"), marks=pytest.mark.exhaustive),
        pytest.param("torchrun", ("export", "save", "exit", "collective"), marks=pytest.mark.exhaustive),
    ],
)
def test_rank_0_may_work_alone_after_training_but_what_needs_the_others_is_said_in_one_sentence(
    tmp_path: Path, launcher: str, endings: tuple[str, ...]
) -> None:
    """All at the same time, because most of it is waiting."""
    launches = {how: start(launcher, how, tmp_path / how) for how in endings}
    for how, process in launches.items():
        text = process.communicate(timeout=LIMIT_S)[0]
        if how == "export":
            assert process.returncode == 0 and "lockstep" not in text, text
            assert (tmp_path / how / "result").read_text() == "kept"
            continue
        assert process.returncode in (1, 124), text
        assert "another machine" not in text and "Connection closed by peer" not in text, text
        call = {"save": "save_state", "exit": "gather", "collective": "all_reduce"}[how]
        # rank 0 hears of the end before it waits or when it loses the connection, or the watch names it meanwhile
        said = rf"{call} must be called by every process.*, but rank 1 has ended without entering the call at ending.py"
        named = rf"rank 1 has ended( with exit code 0)?, and rank 0 waits for it in .*{call}.* at .*ending.py"
        assert re.search(f"{said}|{named}", text), text
