"""The real Open MPI on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.cluster.daemons import program
from tests.launch import training
from tests.launch.fakes import CANARY, canaries
from tests.launch.helpers import WAITING, check_ends_with, run, start

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def open_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program("mpirun")
    monkeypatch.chdir(tmp_path)
    if os.geteuid() == 0:
        monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
        monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")


def test_two_ranks_train_together(tmp_path: Path) -> None:
    # on one machine mpirun hands on its environment, as a shell would; a rank of ours sees what a local one sees
    (tmp_path / "train.py").write_text(training.SCRIPT.replace('"HF_" in name', "False"))
    words = ["a b", "$(touch pwned)", "'\"\n;`x`", "-x", "é"]
    done = run("--mpi", "--nproc", 2, "--cpu", "train.py", *words, OMP_NUM_THREADS="1", **canaries())
    assert done.returncode == training.EXIT_CODE, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] trained 0", "[rank 1] trained 1"]
    assert CANARY not in done.stdout + done.stderr
    training.check_results(tmp_path, words)
    assert not (tmp_path / "pwned").exists()


def test_killing_the_launcher_ends_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    launcher = start("--mpi", "--nproc", 2, "--no-python", sys.executable, "-c", WAITING)
    check_ends_with(launcher, tmp_path / "pids")
