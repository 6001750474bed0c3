"""Nothing that a launch started outlives it, whatever ended it, and in whatever state it was."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.launch.helpers import START_LIMIT_S, alive, start, wait_until

GONE_WITHIN_S = 2.0

# Each worker starts a child in a session of its own, as some loaders and servers do. In the first round rank 1 fails;
# in the second, rank 0 and its child are stopped.
SCRIPT = """
import os, pathlib, signal, subprocess, sys, time
here, rank, round = pathlib.Path(sys.argv[1]), os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"], start_new_session=True)
(here / f"{round}-{rank}-child-{child.pid}").touch()
(here / f"{round}-{rank}-worker-{os.getpid()}").touch()
while len(list(here.glob(f"{round}-*"))) < 4: time.sleep(0.01)
if (round, rank) == ("0", "1"): sys.exit(3)
if (round, rank) == ("1", "0"):
    os.kill(child.pid, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(300)
"""


def processes_of(folder: Path, round: int) -> list[int]:
    return [int(path.name.rpartition("-")[2]) for path in folder.glob(f"{round}-*")]


def guard_of(launcher: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(launcher).children():
        try:
            found += [child] if "--guard" in child.cmdline() else []
        except psutil.Error:  # ended meanwhile, and not reaped
            continue
    return found


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where launches of this test keep their secrets."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def secrets_in(temporary: Path) -> list[Path]:
    return list(temporary.glob("*/control"))


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_stopped_workers_of_a_second_round_end_with_a_launcher_whose_guard_was_killed(
    name: str, tmp_path: Path, temporary: Path
) -> None:
    script, pids = tmp_path / "wait.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    pids.mkdir()
    launcher = start("--nproc", 2, "--max-restarts", 1, script, pids)
    wait_until(lambda: len(processes_of(pids, 1)) == 4, START_LIMIT_S)
    assert not any(alive(pid) for pid in processes_of(pids, 0)), "the first round left something behind"
    processes = processes_of(pids, 1)
    stopped = [int(path.name.rpartition("-")[2]) for path in pids.glob("1-0-*")]
    wait_until(lambda: all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in stopped), 10.0)
    assert len(secrets_in(temporary)) == 1
    (guard,) = guard_of(launcher.pid)
    mark = f"LOCKSTEP_LAUNCH_ID={guard.cmdline()[-1]}".encode()
    guard.kill()
    number = signal.Signals[name]
    launcher.send_signal(number)
    wait_until(lambda: not any(alive(pid) for pid in processes), GONE_WITHIN_S)
    wait_until(lambda: not any(mark in environ for environ in environments()), GONE_WITHIN_S)  # nor a watch
    wait_until(lambda: not list(temporary.glob("lockstep-*")), GONE_WITHIN_S)
    launcher.communicate(timeout=10.0)
    assert launcher.returncode == (-9 if name == "SIGKILL" else 75)  # no step was made: nothing is lost


def environments() -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return found
