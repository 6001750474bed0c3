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


class Launch:
    """``ending.py HOW``, by one of the launchers."""

    def __init__(self, command: list[str], how: str, out: Path) -> None:
        out.mkdir()
        self.out = out
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP")}
        self.process = subprocess.Popen(
            [*command, str(SCRIPT), how, str(out)],
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self) -> tuple[int, str]:
        text = self.process.communicate(timeout=LIMIT_S)[0]
        return self.process.returncode, text


def by(launcher: str) -> list[str]:
    return LAUNCH if launcher == "ours" else [*TORCHRUN, str(free_port())]


def check_rank_0_may_work_alone_after_training(launch: Launch) -> None:
    code, text = launch.end()
    assert code == 0, text
    assert "lockstep" not in text, text
    assert (launch.out / "result").read_text() == "kept"


def check_what_it_calls_is_said_in_one_sentence(launch: Launch, how: str) -> None:
    code, text = launch.end()
    assert code in (1, 124), text
    assert "another machine" not in text
    assert "Connection closed by peer" not in text, text
    call = {"save": "save_state", "exit": "gather", "collective": "all_reduce"}[how]
    # rank 0 hears of the end before it waits or when it loses the connection, or the watch names it meanwhile
    said = rf"{call} must be called by every process.*, but rank 1 has ended without entering the call at ending.py"
    named = rf"rank 1 has ended( with exit code 0)?, and rank 0 waits for it in .*{call}.* at .*ending.py"
    assert re.search(f"{said}|{named}", text), text


@pytest.mark.parametrize(
    ("launcher", "endings"),
    [
        ("ours", ("export", "save", "collective")),
        pytest.param("ours", ("exit",), marks=pytest.mark.exhaustive),
        pytest.param("torchrun", ("export", "save", "exit", "collective"), marks=pytest.mark.exhaustive),
    ],
)
def test_rank_0_may_work_alone_after_training_but_what_needs_the_others_is_said_in_one_sentence(
    tmp_path: Path, launcher: str, endings: tuple[str, ...]
) -> None:
    """All at the same time, because most of it is waiting."""
    launches = {how: Launch(by(launcher), how, tmp_path / how) for how in endings}
    for how, launch in launches.items():
        if how == "export":
            check_rank_0_may_work_alone_after_training(launch)
        else:
            check_what_it_calls_is_said_in_one_sentence(launch, how)
