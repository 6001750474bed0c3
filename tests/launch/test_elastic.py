"""Restarts and machines that come and go, with the real launcher; two machines are two launchers on the loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lockstep.launch import Restarts
from lockstep.testing import free_port
from tests.launch import elastic_run
from tests.launch.helpers import COMMAND, START_LIMIT_S, environment, run, wait_until
from tests.launch.ledger import committed_step, samples_seen, worlds

RUN = elastic_run.__file__
SAMPLES = 32


# -- one machine ---------------------------------------------------------------------------------------


def test_a_run_without_progress_is_not_started_for_ever(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text("import pathlib, sys\nopen(sys.argv[1], 'a').write('x')\nsys.exit(3)\n")
    done = run("--nproc", 1, "--max-restarts", 50, script, tmp_path / "starts")
    assert done.returncode == 3
    assert (tmp_path / "starts").read_text() == "xxx"
    assert done.stderr.count("restart 1 of 50: rank 0 failed (exit code 3); resuming.") == 1
    assert "lockstep: rank 0 failed first (exit code 3)." in done.stderr
    assert "3 rounds in a row ended without a new checkpoint" in done.stderr.splitlines()[-1]


def test_progress_is_a_new_checkpoint_and_unknown_is_not_none() -> None:
    steady = Restarts(most=100)
    for commits in range(1, 50):
        steady.round_started(commits - 1)
        assert steady.round_failed("rank 0 failed", commits).again
    unknown = Restarts(most=100)
    for _ in range(50):
        unknown.round_started(None)
        assert unknown.round_failed("rank 0 failed", None).again
    stalled = Restarts(most=100)
    answers: list[bool] = []
    for commits in (1, 1, 1, 1):  # the first round made one
        stalled.round_started(0 if not answers else 1)
        answers.append(stalled.round_failed("rank 0 failed", commits).again)
    assert answers == [True, True, True, False]


def test_used_up_restarts_end_the_run_with_the_failing_rank_s_code(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(9)\ntime.sleep(300)\n")
    done = run("--nproc", 2, "--max-restarts", 1, "--log-dir", tmp_path / "logs", script)
    assert done.returncode == 9
    said = [line for line in done.stderr.splitlines() if line.startswith("lockstep:")]
    assert said == [
        "lockstep: restart 1 of 1: rank 1 failed (exit code 9); resuming.",
        "lockstep: rank 1 failed first (exit code 9); the other process was ended.",
        "lockstep: The one restart was used.",
    ]
    assert sorted(path.name for path in (tmp_path / "logs").glob("*.err")) == [
        "rank-0.err",
        "rank-0.restart-1.err",
        "rank-1.err",
        "rank-1.restart-1.err",
    ]


def test_exit_code_75_of_the_workers_is_that_of_the_launch_and_no_failure(tmp_path: Path) -> None:
    script = tmp_path / "stop.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': time.sleep(0.5)\nsys.exit(75)\n")
    done = run("--nproc", 2, "--max-restarts", 3, script)
    assert done.returncode == 75
    assert done.stderr == "lockstep: all ranks stopped and saved their state.\n"


# -- two machines --------------------------------------------------------------------------------------


class Machines:
    """Launchers on the loopback, each with its whole tree of processes in a session of its own."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._environment = environment(XDG_CONFIG_HOME=str(folder / "config"), OMP_NUM_THREADS="1")
        self.launchers: list[subprocess.Popen[str]] = []

    def start(self, machines: str, rank: int | None, *words: object, **extra: str) -> subprocess.Popen[str]:
        flags = ["--nnodes", machines, "--nproc", "1", "--main-process-ip", "127.0.0.1"]
        flags += ["--main-process-port", str(self.port)]
        flags += [] if rank is None else ["--machine-rank", str(rank)]
        launcher = subprocess.Popen(
            [*COMMAND, *flags, *map(str, words)],
            env={**self._environment, **extra},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.launchers.append(launcher)
        return launcher


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    for launcher in made.launchers:
        if launcher.poll() is None:
            launcher.kill()
        launcher.communicate()


def tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def kill_tree(pid: int) -> None:
    """SIGKILL to a launcher and all that it started, at once: its machine loses power."""
    for process in tree(pid):
        process.kill()


def listening(pid: int) -> set[str]:
    """The addresses on which a launcher, or a process that it started, listens."""
    found = set()
    for process in tree(pid):
        with suppress(psutil.NoSuchProcess):
            sockets = process.net_connections()
            found |= {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}
    return found


def test_the_survivor_of_two_machines_goes_on_alone(tmp_path: Path, machines: Machines) -> None:
    (tmp_path / "slow").touch()
    first, second = (machines.start("1:2", rank, RUN, tmp_path, SAMPLES, 0) for rank in (0, 1))
    wait_until(lambda: committed_step(tmp_path) >= 1, START_LIMIT_S)
    assert {address for launcher in (first, second) for address in listening(launcher.pid)} == {"127.0.0.1"}
    kill_tree(second.pid)
    (tmp_path / "slow").unlink()
    _, err = first.communicate(timeout=START_LIMIT_S)
    assert first.returncode == 0, err
    assert f"restart 1 of 1000: machine {socket.gethostname()} was lost (its connection closed)" in err
    assert worlds(tmp_path) == [2, 1]
    assert sorted(samples_seen(tmp_path)) == list(range(SAMPLES))


def test_a_fixed_launch_ends_on_all_machines_when_one_fails(tmp_path: Path, machines: Machines) -> None:
    script = tmp_path / "fail.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(9)\ntime.sleep(300)\n")
    launchers = [machines.start("2", rank, script) for rank in (0, 1)]
    errors = [launcher.communicate(timeout=START_LIMIT_S)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [9, 9], errors
    assert f"rank 1 on {socket.gethostname()} failed (exit code 9); all processes were ended." in errors[0]
    assert "rank 1 failed first (exit code 9); the other process was ended." in errors[1]


def test_the_others_end_when_the_machine_that_hosts_is_lost(tmp_path: Path, machines: Machines) -> None:
    script = tmp_path / "wait.py"
    script.write_text(
        "import os, pathlib, sys, time\npathlib.Path(sys.argv[1], os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(300)\n"
    )
    hosting, other = (machines.start("2", rank, script, tmp_path) for rank in (0, 1))
    wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists(), START_LIMIT_S)
    kill_tree(hosting.pid)
    took = wait_until(lambda: other.poll() is not None, 10.0)
    assert took < 3.0
    assert other.returncode == 1
    assert (
        f"hosts this launch, 127.0.0.1:{machines.port}, is gone. All processes here were ended."
        in (other.communicate()[1])
    )


def test_who_does_not_know_the_secret_or_runs_something_else_is_refused(
    tmp_path: Path, machines: Machines
) -> None:
    script, other_script = tmp_path / "one.py", tmp_path / "other.py"
    script.write_text("import time; time.sleep(300)\n")
    other_script.write_text("")
    hosting = machines.start("2", 0, script)
    assert hosting.stderr is not None
    place = f"127.0.0.1:{machines.port}"
    assert hosting.stderr.readline() == (
        f"lockstep: machine 0 ({socket.gethostname()}) waits for machine 1 at {place}.\n"
    )
    stranger = machines.start("2", 1, script, LOCKSTEP_SECRET="ab" * 32)
    confused = machines.start("2", 1, other_script)
    _, said = stranger.communicate(timeout=START_LIMIT_S)
    assert stranger.returncode == 2
    assert "Give both ends the same secret." in said
    assert "ab" * 8 not in said
    _, said = confused.communicate(timeout=START_LIMIT_S)
    assert confused.returncode == 2
    assert "the launch there is one.py on 2 machines, but here it is other.py on 2 machines." in said
    hosting.send_signal(signal.SIGINT)
    assert hosting.wait(10) == 130


def test_ports_and_addresses_that_cannot_be_used_are_refused_at_once(machines: Machines) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", machines.port))
        taken.listen()
        launcher = machines.start("2", 0, "--no-python", "true")
        _, said = launcher.communicate(timeout=START_LIMIT_S)
    assert launcher.returncode == 2
    assert f"main_process_port {machines.port} cannot be used: pid {os.getpid()} (" in said
    flags = ("--nnodes", 2, "--nproc", 1, "--main-process-port", machines.port, "--no-python")
    for address, rank, words in (
        ("no-such-host.invalid", 1, "main_process_ip no-such-host.invalid is not known here"),
        ("192.0.2.1", 0, "main_process_ip 192.0.2.1 is not an address of this machine"),
    ):
        done = run("--main-process-ip", address, "--machine-rank", rank, *flags, "true")
        assert done.returncode == 2, done.stderr
        assert words in done.stderr
    done = run("--main-process-ip", "127.0.0.1", "--interface", "nope0", "--machine-rank", 1, *flags, "true")
    assert done.returncode == 2
    assert "interface nope0 has no address" in done.stderr
