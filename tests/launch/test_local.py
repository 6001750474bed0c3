from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.launch import DONE, ID_VARIABLE, members
from tests.compat.accelerate_examples import TWO_MACHINES
from tests.launch.helpers import alive, pids_in, run, start, wait_until

BARE = inspect.getfile(members)

GONE_WITHIN_S = 2.0
ENDED_WITHIN_S = 5.0

SHOW = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
names += ("OMP_NUM_THREADS", "LOCKSTEP_MIXED_PRECISION", "LOCKSTEP_USE_CPU")
facts = {name: os.environ.get(name) for name in names}
facts |= {"argv": sys.argv[1:], "name": __name__, "file": sys.modules["__main__"].__file__, "path0": sys.path[0]}
facts["torch"] = "torch" in sys.modules
os.write(1, (json.dumps(facts) + "\\n").encode())  # one write, which the other rank's cannot cut in two
"""

WAIT = """
import os, pathlib, subprocess, sys, time
here = pathlib.Path(sys.argv[1])
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"], start_new_session=True)
(here / str(child.pid)).touch()
(here / str(os.getpid())).touch()
time.sleep(300)
"""


@pytest.fixture
def show(tmp_path: Path) -> Path:
    path = tmp_path / "show.py"
    path.write_text(SHOW)
    return path


def test_children_of_the_script_get_no_secret_in_their_environment(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(
        "import os, pathlib, subprocess\n"
        "from lockstep.config import control_endpoint\n"
        "seen = subprocess.run(['env'], capture_output=True, text=True).stdout\n"
        "own = pathlib.Path('/proc/self/environ').read_text()\n"
        "secret = control_endpoint().secret_hex\n"
        "print(len(secret), secret in seen, secret in own, 'SECRET' in seen, flush=True)\n"
        "print(oct(os.stat(os.environ['LOCKSTEP_CONTROL_FILE']).st_mode))\n"
    )
    done = run("--nproc", 1, script)
    assert (done.stdout, done.stderr) == ("64 False False False\n0o100600\n", "")


def facts_of(output: str) -> list[dict[str, object]]:
    return sorted((json.loads(line) for line in output.splitlines()), key=lambda facts: str(facts["RANK"]))


def test_each_worker_gets_its_place_its_settings_and_an_untouched_main(show: Path) -> None:
    done = run("--nproc", 2, "--num-cpu-threads", 3, "--mixed-precision", "bf16", show, "--lr", "$${x} 'a b'")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    workers = facts_of(done.stdout)
    assert [worker["RANK"] for worker in workers] == ["0", "1"]
    for worker in workers:
        assert worker["WORLD_SIZE"] == worker["LOCAL_WORLD_SIZE"] == "2"
        assert worker["MASTER_ADDR"] == "127.0.0.1"
        assert worker["OMP_NUM_THREADS"] == "3"
        assert worker["LOCKSTEP_MIXED_PRECISION"] == "bf16"
        assert worker["argv"] == ["--lr", "$${x} 'a b'"]
        assert (worker["name"], worker["file"], worker["path0"]) == ("__main__", str(show), str(show.parent))
        assert worker["torch"] is False


@pytest.mark.parametrize("name", ["SIGKILL", "SIGUSR1"])
def test_no_process_survives_the_launcher_not_even_workers_children(name: str, tmp_path: Path) -> None:
    script, pids = tmp_path / "wait.py", tmp_path / "pids"
    script.write_text(WAIT)
    pids.mkdir()
    launcher = start("--nproc", 2, script, pids)
    processes = pids_in(pids, count=4)
    assert all(alive(pid) for pid in processes)
    number = signal.Signals[name]
    launcher.send_signal(number)
    wait_until(lambda: not any(alive(pid) for pid in processes), GONE_WITHIN_S)
    _, stderr = launcher.communicate(timeout=ENDED_WITHIN_S)
    # no worker has made a step, or an Accelerator: nothing is lost
    is_stop = name == "SIGUSR1"
    assert launcher.returncode == (75 if is_stop else -9)
    if is_stop:
        said = f"lockstep: ended by {name} before the first step of an Accelerator; nothing was saved.\n"
        assert stderr == said


def test_ranks_that_fail_alike_show_one_traceback(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "from lockstep.runtime import install_excepthook\n"
        "install_excepthook()\n"
        "here = pathlib.Path(sys.argv[1])\n"
        "(here / os.environ['RANK']).touch()\n"
        "while len(list(here.iterdir())) < 3: time.sleep(0.001)\n"
        "def end_together(*_):\n"
        "    (here / ('failed-' + os.environ['RANK'])).touch()\n"
        "    while len(list(here.glob('failed-*'))) < 3: time.sleep(0.001)\n"
        "import atexit; atexit.register(end_together)\n"
        "raise ValueError('the same on all')\n"
    )
    (tmp_path / "met").mkdir()
    done = run("--nproc", 3, script, tmp_path / "met")
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    assert done.stderr.count("ValueError: the same on all") == 2
    assert "lockstep: all 3 ranks failed alike (ValueError: the same on all).\n" in done.stderr


@pytest.mark.parametrize(
    ("ends", "code", "cause", "tracebacks"),
    [
        ("raise ValueError('the root cause')", 1, "ValueError: the root cause", 1),
        ("os.kill(os.getpid(), 9)", 137, "ended by SIGKILL", 0),
    ],
)
def test_the_first_failing_rank_is_shown_once_its_consequences_are_not_and_all_end_soon(
    tmp_path: Path, ends: str, code: int, cause: str, tracebacks: int
) -> None:
    script = tmp_path / "fail.py"
    script.write_text(
        "import os, pathlib, sys, time, torch, torch.distributed as dist\n"
        "from lockstep.runtime import install_excepthook\n"
        "install_excepthook()\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1:\n"
        "    pathlib.Path(sys.argv[1]).write_text(str(time.time()))\n"
        f"    {ends}\n"
        "dist.all_reduce(torch.ones(2))\n"
    )
    done = run("--nproc", 2, script, tmp_path / "when")
    took = time.time() - float((tmp_path / "when").read_text())
    assert done.returncode == code
    assert done.stderr.count("Traceback (most recent call last)") == tracebacks
    assert done.stderr.count(cause) == tracebacks + 1
    last = f"lockstep: rank 1 failed first ({cause}); the other process was ended."
    assert last in done.stderr.splitlines()
    assert took < ENDED_WITHIN_S


def test_a_rank_that_ignores_the_polite_signal_is_ended_too(tmp_path: Path) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).touch()\n"
        "while len(os.listdir(sys.argv[1])) < 2: time.sleep(0.01)\n"
        "if os.environ['RANK'] == '1': pathlib.Path(sys.argv[2]).write_text(str(time.time())); sys.exit(7)\n"
        "time.sleep(300)\n"
    )
    (tmp_path / "ready").mkdir()
    done = run("--nproc", 2, script, tmp_path / "ready", tmp_path / "when")
    assert time.time() - float((tmp_path / "when").read_text()) < ENDED_WITHIN_S
    assert done.returncode == 7
    assert done.stderr == "lockstep: rank 1 failed first (exit code 7); the other process was ended.\n"


def test_with_log_files_the_traceback_of_the_failing_rank_is_still_shown(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text(
        "import os, pathlib, time\nprint('rank', os.environ['RANK'], flush=True)\n"
        "while not list(pathlib.Path(__file__).parent.glob('logs/*0.out'))[0].read_text(): time.sleep(0.01)\n"
        "if os.environ['RANK'] == '1': raise KeyError('lost')\ntime.sleep(300)\n"
    )
    done = run("--nproc", 2, "--log-dir", tmp_path / "logs", script)
    assert done.returncode == 1
    assert done.stderr.count("KeyError: 'lost'") == 1
    assert "rank 1 failed first" in done.stderr
    assert f"Its output is in {tmp_path}/logs/rank-1.err." in done.stderr
    assert done.stdout == ""
    for rank in "01":
        assert (tmp_path / "logs" / f"rank-{rank}.out").read_text() == f"rank {rank}\n"


def test_a_program_that_cannot_be_run_is_said_without_a_traceback() -> None:
    done = run("--nproc", 1, "--no-python", "/nonexistent/program")
    assert done.returncode == 127
    assert "cannot run /nonexistent/program: No such file or directory." in done.stderr
    assert "Traceback" not in done.stderr


def test_two_machines_of_one_file_form_one_world(show: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    text = TWO_MACHINES.replace("192.168.20.1", "127.0.0.1").replace("8080", str(port))
    text = text.replace("num_processes: 16", "num_processes: 2")
    machines = []
    for rank in (0, 1):
        path = tmp_path / f"machine{rank}.yaml"
        path.write_text(text.replace("machine_rank: 1", f"machine_rank: {rank}"))
        machines.append(start("--config-file", path, show))
    workers = []
    for machine in machines:
        stdout, stderr = machine.communicate(timeout=90)
        assert machine.returncode == 0, stderr
        workers += facts_of(stdout)
    assert sorted(str(worker["RANK"]) for worker in workers) == ["0", "1"]
    assert {worker["WORLD_SIZE"] for worker in workers} == {"2"}
    assert {worker["LOCAL_WORLD_SIZE"] for worker in workers} == {"1"}
    assert {worker["GROUP_RANK"] for worker in workers} == {"0", "1"}
    assert {worker["LOCKSTEP_MIXED_PRECISION"] for worker in workers} == {"fp16"}


def test_a_worker_whose_parent_is_gone_already_does_not_start() -> None:
    command = [sys.executable, "-I", "-S", BARE, "--worker", "1", "echo", "started"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (137, "")


def test_the_guard_spares_processes_of_others_and_of_a_launch_that_is_done() -> None:
    sleepers = {
        name: subprocess.Popen(["sleep", "300"], env={**os.environ, ID_VARIABLE: name})
        for name in ("mine", "other")
    }
    try:
        command = [sys.executable, "-I", "-S", BARE, "--guard", "mine"]
        subprocess.run(command, input=DONE, timeout=30, check=True)
        assert all(alive(sleeper.pid) for sleeper in sleepers.values())
        subprocess.run(command, input=b"", timeout=30, check=True)
        assert not alive(sleepers["mine"].pid)
        assert alive(sleepers["other"].pid)
    finally:
        for sleeper in sleepers.values():
            sleeper.kill()
            sleeper.wait()
