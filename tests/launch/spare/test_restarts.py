"""Rounds that begin with spare processes, by the real launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from lockstep.launch import ID_VARIABLE, members
from tests.launch.helpers import START_LIMIT_S, alive, start, wait_until
from tests.launch.spare import training
from tests.launch.test_elastic import Machines, kill_tree

SCRIPT = training.__file__
READY = ["lockstep-spare", "ready"]
GONE_WITHIN_S = 2.0


def spares_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """Those that have imported everything."""
    found = []
    for child in psutil.Process(launcher.pid).children():
        try:
            found += [child] if [word for word in child.cmdline() if word] == READY else []
        except psutil.Error:
            continue
    return found


def wait_for_spares(launcher: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    wait_until(lambda: len(spares_of(launcher)) == count or launcher.poll() is not None, START_LIMIT_S)
    assert launcher.poll() is None, launcher.communicate()
    return spares_of(launcher)


def wait_for_ranks(folder: Path, number: int, nproc: int) -> None:
    wait_until(lambda: len(list(folder.glob(f"waits-{number}-*"))) == nproc, START_LIMIT_S)


def trained(folder: Path, nproc: int, warm: bool, rounds: int = 3) -> tuple[list[list[object]], str]:
    """What the ranks printed, sorted, and the launcher's own lines; the last rank fails in all rounds but one."""
    flags = ("--cpu", "--max-restarts", rounds, "--log-dir", folder / "log", "--tee")
    launcher = start(
        "--nproc", nproc, *flags, *(() if warm else ("--no-warm-restarts",)), SCRIPT, folder, rounds
    )
    try:
        for number in range(rounds - 1):
            wait_for_ranks(folder, number, nproc)
            wait_for_spares(launcher, nproc if warm else 0)
            (folder / f"fail-{number}-{nproc - 1}").touch()
        shown, errors = launcher.communicate(timeout=START_LIMIT_S)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, errors
    texts = [path.read_text() for path in (folder / "log").glob("*.out")]
    assert len(texts) == nproc * rounds
    assert f"[rank 0] [{rounds - 1}, 0, " in shown
    return sorted(json.loads(line) for text in texts for line in text.splitlines()), errors


@pytest.mark.parametrize(
    "nproc", [2, pytest.param(1, marks=pytest.mark.exhaustive), pytest.param(4, marks=pytest.mark.exhaustive)]
)
def test_training_that_goes_on_in_spare_processes_is_bit_for_bit_that_of_new_ones(
    nproc: int, tmp_path: Path
) -> None:
    warm, said = trained(tmp_path / "warm", nproc, warm=True)
    cold, _ = trained(tmp_path / "cold", nproc, warm=False)
    assert [(number, is_spare) for number, _, _, is_spare, *_ in warm] == [
        (number, number > 0) for number in range(3) for _ in range(nproc * training.STEPS_OF_A_ROUND)
    ], said
    assert not any(line[3] for line in cold)
    assert [line[:3] + line[4:] for line in warm] == [line[:3] + line[4:] for line in cold]
    files = [(tmp_path / kind / "weights.json").read_text() for kind in ("warm", "cold")]
    assert files[0] == files[1]
    assert "without libraries" not in said and said.count("; resuming.") == 2


def test_a_spare_process_that_was_killed_is_replaced_by_a_new_one(tmp_path: Path) -> None:
    launcher = start(
        "--nproc", 2, "--cpu", "--max-restarts", 2, "--log-dir", tmp_path / "log", SCRIPT, tmp_path, 2
    )
    try:
        wait_for_ranks(tmp_path, 0, 2)
        spares = wait_for_spares(launcher, 2)
        killed = next(spare for spare in spares if spare.environ()["LOCAL_RANK"] == "0")
        killed.kill()
        (tmp_path / "fail-0-1").touch()
        _, errors = launcher.communicate(timeout=START_LIMIT_S)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, errors
    sentence = "workers start without libraries that were imported before: its spare process ended with -9."
    assert errors.count(sentence) == 1
    for rank, is_spare in ((0, False), (1, True)):
        lines = (tmp_path / "log" / f"rank-{rank}.restart-1.out").read_text().splitlines()
        assert [json.loads(line)[:4] for line in lines] == [[1, rank, step, is_spare] for step in range(5, 9)]
        assert (tmp_path / "log" / f"rank-{rank}.restart-1.err").read_text() == ""
    assert not any(alive(spare.pid) for spare in spares)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_nothing_is_left_of_a_launcher_whose_spare_processes_wait(name: str, tmp_path: Path) -> None:
    launcher = start("--nproc", 1, "--cpu", "--max-restarts", 2, SCRIPT, tmp_path, 2)
    try:
        wait_for_ranks(tmp_path, 0, 1)
        (spare,) = wait_for_spares(launcher, 1)
        launch_id = spare.environ()[ID_VARIABLE]
        assert len(members(launch_id, with_watches=True)) >= 4  # worker, spare process, and a watch of each
        launcher.send_signal(signal.Signals[name])
        launcher.wait(START_LIMIT_S)
        wait_until(lambda: not members(launch_id, with_watches=True), GONE_WITHIN_S)
    finally:
        launcher.kill()
        launcher.communicate()


def test_a_round_leaves_nothing_but_the_spare_processes(tmp_path: Path) -> None:
    launcher = start("--nproc", 1, "--cpu", "--max-restarts", 2, SCRIPT, tmp_path, 3)
    try:
        for number in range(2):
            wait_for_ranks(tmp_path, number, 1)
            (spare,) = wait_for_spares(launcher, 1)
            launch_id, before = spare.environ()[ID_VARIABLE], set(members(spare.environ()[ID_VARIABLE], True))
            (tmp_path / f"fail-{number}-0").touch()
            if number == 0:
                wait_for_ranks(tmp_path, 1, 1)
                children = {child.pid for child in spare.children(recursive=True)}
                kept = before & set(members(launch_id, True))
                # the worker is what was the spare process; its watch came with it
                assert spare.pid in kept and len(kept - children) == 2
                assert os.getpgid(spare.pid) == spare.pid
        launcher.communicate(timeout=START_LIMIT_S)
        assert launcher.returncode == 0
        wait_until(lambda: not members(launch_id, with_watches=True), GONE_WITHIN_S)
    finally:
        launcher.kill()
        launcher.communicate()


def test_a_machine_that_is_left_alone_goes_on_with_a_spare_process_as_another_world(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    try:
        first, second = (
            machines.start("1:2", rank, "--log-dir", tmp_path / f"log-{rank}", SCRIPT, tmp_path, 2)
            for rank in (0, 1)
        )
        wait_for_ranks(tmp_path, 0, 2)
        wait_for_spares(first, 1)
        kill_tree(second.pid)
        _, errors = first.communicate(timeout=START_LIMIT_S)
        assert first.returncode == 0, errors
    finally:
        for launcher in machines.launchers:
            launcher.kill()
            launcher.communicate()
    lines = (tmp_path / "log-0" / "rank-0.restart-1.out").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [line[:4] for line in found] == [[1, 0, step, True] for step in range(5, 9)]
    assert {line[5] for line in found} == {1}
