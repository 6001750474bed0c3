"""Workers that are forks of one process: as new processes are, and gone with their launcher."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from lockstep.launch import ID_VARIABLE, ForkServer, members
from tests.launch import elastic_run
from tests.launch.helpers import START_LIMIT_S, alive, run, start, wait_until
from tests.launch.ledger import committed_step, samples_seen, weights, worlds

RUN, SAMPLES = elastic_run.__file__, 16
GONE_WITHIN_S = 2.0
WHAT_A_SCRIPT_SEES = """
import atexit, json, multiprocessing, os, pickle, sys, threading

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
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=in_a_child, args=(queue,))
    child.start()
    print("child of", queue.get(), child.join(), child.exitcode)
    atexit.register(print, "at exit")
    raise ValueError("what went wrong")
"""


def test_a_script_sees_what_it_sees_in_a_new_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WHAT_A_SCRIPT_SEES)
    found: dict[str, object] = {}
    for kind, flags in (("new", ()), ("fork", ("--warm-restarts",))):
        log = tmp_path / kind
        done = run("--nproc", 1, "--cpu", *flags, "--log-dir", log, script, "an argument")
        # The script's line of a traceback, and the last one.
        errors = (log / "rank-0.err").read_text().splitlines()
        told = [line for line in errors if "script.py" in line or "wrong" in line]
        output = (log / "rank-0.out").read_text()
        assert output.endswith("at exit\n") and told
        found[kind] = done.returncode, output, told
    assert found["fork"] == found["new"]


def test_training_that_goes_on_in_forks_is_bit_for_bit_that_of_new_processes(tmp_path: Path) -> None:
    found = []
    for kind, flags in (("warm", ["--warm-restarts"]), ("cold", [])):
        folder = tmp_path / kind
        folder.mkdir()
        words = ["--nproc", 2, "--max-restarts", 1, *flags, RUN, folder, SAMPLES, 0, "SIGKILL:1:2"]
        done = run(*words, WORKERS="1")
        assert done.returncode == 0, done.stderr
        lines = [
            json.loads(line) for file in folder.glob("ledger-*") for line in file.read_text().splitlines()
        ]
        assert {line["is_fork"] for line in lines} == {kind == "warm"}
        found.append((weights(folder), samples_seen(folder), worlds(folder)))
    assert found[0] == found[1]
    assert sorted(found[0][1]) == list(range(SAMPLES)) and found[0][2] == [2, 2]


def test_nothing_is_left_of_a_launcher_with_forks_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    launcher = start("--nproc", 2, "--cpu", "--warm-restarts", RUN, tmp_path, SAMPLES, 0)
    try:
        wait_until(lambda: committed_step(tmp_path) >= 1, START_LIMIT_S)
        children = psutil.Process(launcher.pid).children()
        (launch_id,) = {child.environ()[ID_VARIABLE] for child in children if ID_VARIABLE in child.environ()}
        assert len(members(launch_id, with_watches=True)) >= 3  # two workers, and what they are forks of
        launcher.kill()
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
    assert said == ["lockstep: the process of --warm-restarts did not answer; workers import torch anew."]
