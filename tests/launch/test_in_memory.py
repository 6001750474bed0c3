"""Checkpoints in memory last as long as their launch: through restarts and lost machines, and not longer."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from tests.launch.helpers import START_LIMIT_S, run, start, wait_until
from tests.launch.ledger import committed_step, samples_seen, weights, worlds
from tests.launch.test_elastic import RUN, SAMPLES, Machines, kill_tree, machines

__all__ = ["machines"]  # the fixture


def folder_of(launcher: subprocess.Popen[str]) -> Path:
    """The folder in memory of a launch."""
    handles = Path(f"/proc/{launcher.pid}/fd").iterdir()
    (found,) = {path for handle in handles if "lockstep-memory-" in str(path := handle.readlink())}
    return found


def test_a_run_that_saves_in_memory_alone_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder, faults in ((whole, ()), (killed, ("SIGKILL:0:3",))):
        folder.mkdir()
        done = run("--nproc", 2, "--max-restarts", 3, RUN, folder, SAMPLES, 0, *faults, IN_MEMORY="1")
        assert done.returncode == 0, done.stderr
        assert not list(folder.glob("checkpoints/checkpoint_*"))
    assert done.stderr.count("; resuming.") == 1
    assert weights(killed) == weights(whole)
    assert samples_seen(killed) == samples_seen(whole)
    assert committed_step(killed, of_round=1) == SAMPLES // 4


def test_the_survivor_of_two_machines_has_what_the_other_saved_and_gives_it_to_a_new_one(
    tmp_path: Path, machines: Machines
) -> None:
    (tmp_path / "slow").touch()
    words = (RUN, tmp_path, SAMPLES, 0)
    first, second = (machines.start("2:3", rank, *words, IN_MEMORY="1") for rank in (0, 1))
    wait_until(lambda: committed_step(tmp_path, of_round=0) >= 2, START_LIMIT_S)
    lost = folder_of(second)
    kill_tree(second.pid)
    third = machines.start("2:3", 2, *words, IN_MEMORY="1")
    wait_until(lambda: committed_step(tmp_path, of_round=1) >= 3, START_LIMIT_S)
    folders = [folder_of(launcher) for launcher in (first, third)]
    (tmp_path / "slow").unlink()
    errors = [launcher.communicate(timeout=START_LIMIT_S)[1] for launcher in (first, third)]
    assert [first.returncode, third.returncode] == [0, 0], errors
    assert worlds(tmp_path) == [2, 2]
    assert sorted(samples_seen(tmp_path)) == list(range(SAMPLES))
    assert not list(tmp_path.glob("checkpoints/checkpoint_*"))
    # The lost one's guard was killed, too: the third launch has removed its folder.
    assert not any(folder.exists() for folder in (lost, *folders))


def test_nothing_of_it_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    launcher = start("--nproc", 1, RUN, tmp_path, SAMPLES, 0, IN_MEMORY="1")
    wait_until(lambda: committed_step(tmp_path) >= 1, START_LIMIT_S)
    folder = folder_of(launcher)
    assert list(folder.glob("*/checkpoint_0.*/manifest.json"))
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate()
    wait_until(lambda: not folder.exists(), 10.0)
