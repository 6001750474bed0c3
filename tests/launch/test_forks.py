"""Workers that are forks of one process: as new processes are, and gone with their launcher."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from lockstep.launch import ID_VARIABLE, ForkServer, members
from tests.launch import fork_training as training
from tests.launch.helpers import START_LIMIT_S, alive, run, start, wait_until

GONE_WITHIN_S = 2.0
WHAT_A_SCRIPT_SEES = """
import atexit, json, multiprocessing, os, pickle, random, sys, threading
import numpy as np

class Mine:
    pass

def in_a_child(queue):
    queue.put(os.environ["RANK"])

if __name__ == "__main__":
    print(json.dumps({
        "arguments": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__,
        "main": sys.modules["__main__"].Mine is Mine and type(pickle.loads(pickle.dumps(Mine()))) is Mine,
        "buffered": sys.stdout.line_buffering, "directory": os.getcwd(), "session": os.getsid(0) == os.getpid(),
        "process": multiprocessing.current_process().name, "method": multiprocessing.get_start_method(),
        "parent": multiprocessing.parent_process() is None, "threads": threading.active_count(),
        "variables": {k: v for k, v in os.environ.items() if k.startswith(("LOCAL_", "WORLD_", "RANK", "OMP_"))},
    }, sort_keys=True))
    print("random", random.random(), np.random.rand(), file=sys.stderr)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=in_a_child, args=(queue,))
    child.start()
    print("child of", queue.get(), child.join(), child.exitcode)
    atexit.register(print, "at exit")
    if sys.argv[1] == "raise":
        raise ValueError("what went wrong")
    sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("ending", ["0", "raise", pytest.param("7", marks=pytest.mark.exhaustive)])
def test_a_script_sees_what_it_sees_in_a_new_process(tmp_path: Path, ending: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(WHAT_A_SCRIPT_SEES)
    # A rank that raises may end the other one at any time.
    ranks = range(1 if ending == "raise" else 2)
    found: dict[str, object] = {}
    for kind, flags in (("new", ()), ("fork", ("--warm-restarts",))):
        log = tmp_path / kind
        done = run("--nproc", len(ranks), "--cpu", *flags, "--log-dir", log, script, ending)
        errors = [(log / f"rank-{rank}.err").read_text().splitlines() for rank in ranks]
        assert len({lines[0] for lines in errors}) == len(ranks)  # random numbers of their own
        # The script's line of a traceback, and the last one.
        told = [line for lines in errors for line in lines[1:] if "script.py" in line or "wrong" in line]
        outputs = [(log / f"rank-{rank}.out").read_text() for rank in ranks]
        assert all(text.endswith("at exit\n") for text in outputs) and (ending == "raise") == bool(told)
        found[kind] = done.returncode, outputs, told
    assert found["fork"] == found["new"]


def trained(folder: Path, *flags: str) -> list[list[object]]:
    """What the ranks printed, sorted; the last rank is killed in the first round."""
    log = folder / "log"
    launcher = start(
        "--nproc", 2, "--cpu", "--max-restarts", 1, *flags, "--log-dir", log, training.__file__, folder, 2
    )
    try:
        wait_until(lambda: len(list(folder.glob("waits-0-*"))) == 2, START_LIMIT_S)
        (folder / "fail-0-1").touch()
        _, errors = launcher.communicate(timeout=START_LIMIT_S)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, errors
    texts = [path.read_text() for path in log.glob("*.out")]
    return sorted(json.loads(line) for text in texts for line in text.splitlines())


def test_training_that_goes_on_in_forks_is_bit_for_bit_that_of_new_processes(tmp_path: Path) -> None:
    warm, cold = trained(tmp_path / "warm", "--warm-restarts"), trained(tmp_path / "cold")
    assert len(cold) == 2 * 2 * training.STEPS_OF_A_ROUND
    assert all(line[3] for line in warm) and not any(line[3] for line in cold)
    assert [line[:3] + line[4:] for line in warm] == [line[:3] + line[4:] for line in cold]
    files = [(tmp_path / kind / "weights.json").read_text() for kind in ("warm", "cold")]
    assert files[0] == files[1]


@pytest.mark.parametrize("name", ["SIGKILL", pytest.param("SIGTERM", marks=pytest.mark.exhaustive)])
def test_nothing_is_left_of_a_launcher_with_forks(name: str, tmp_path: Path) -> None:
    launcher = start("--nproc", 2, "--cpu", "--warm-restarts", training.__file__, tmp_path, 2)
    try:
        wait_until(lambda: len(list(tmp_path.glob("waits-0-*"))) == 2, START_LIMIT_S)
        variables = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        texts = [Path(f"/proc/{child}/environ").read_bytes().split(b"\0") for child in variables]
        mark = f"{ID_VARIABLE}=".encode()
        (launch_id,) = {
            line.partition(b"=")[2].decode() for text in texts for line in text if line.startswith(mark)
        }
        assert len(members(launch_id, with_watches=True)) >= 3  # two workers, and what they are forks of
        launcher.send_signal(signal.Signals[name])
        launcher.wait(START_LIMIT_S)
        wait_until(lambda: not members(launch_id, with_watches=True), GONE_WITHIN_S)
    finally:
        launcher.kill()
        launcher.communicate()


def test_forks_end_with_the_process_that_they_are_of(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(600)")
    server = ForkServer((sys.executable, str(script)), print)
    worker = server.fork(0, (), os.environ, None, None)
    assert worker is not None and worker.poll() is None
    server.close()
    assert worker.wait(5.0) == -signal.SIGKILL
    wait_until(lambda: not alive(worker.pid), GONE_WITHIN_S)


def test_without_an_answer_workers_are_new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert ForkServer((sys.executable, "train.py"), said.append).fork(0, (), os.environ, None, None) is None
    assert said == [
        "lockstep launch: the process of --warm-restarts did not answer; workers import torch anew."
    ]
