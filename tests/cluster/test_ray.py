"""``lockstep launch --ray`` with the real package, on a cluster that it starts on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launch.helpers import COMMAND, alive, environment, wait_until

pytest.importorskip("ray", reason="ray is not installed; pip install ray")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

LIMIT_S = 400.0  # Ray itself starts a dozen processes, each of which imports its whole package
TRAIN = """
import json, os, pathlib, sys, time
import psutil, torch
from lockstep import Accelerator, ProjectConfiguration

out, what = pathlib.Path(sys.argv[1]), sys.argv[2]
project = ProjectConfiguration(str(out / "run"), automatic_checkpoint_naming=True)
accelerator = Accelerator(project_config=project)
rank = accelerator.process_index
total = accelerator.reduce(torch.tensor([rank + 1.0]), "sum").item()
secrets = [name for name in os.environ if name.startswith("RAY_AUTH_TOKEN")]
listening = []
for socket in psutil.net_connections("tcp"):
    if socket.status == "LISTEN" and socket.pid:
        try:
            process = psutil.Process(socket.pid)
            if process.environ().get("LOCKSTEP_LAUNCH_ID") == os.environ["LOCKSTEP_LAUNCH_ID"]:
                listening.append((socket.laddr.ip, process.name()))
        except psutil.Error:  # it has ended, or is someone else's
            continue
place = [rank, accelerator.num_processes, total, __name__, sys.argv[3:], secrets, listening]
(out / f"rank-{rank}.json").write_text(json.dumps(place))
print("rank", rank, "is here", flush=True)
if what == "fail" and rank == 1:
    raise ValueError("on purpose")
if what == "once" and os.environ["LOCKSTEP_RESTART"] == "0" and rank == 1:
    os._exit(7)
if what == "train":
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    loader = torch.utils.data.DataLoader(torch.ones(100_000, 1), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        (out / f"pid-{rank}").write_text(str(os.getpid()))
        time.sleep(0.02)
"""


def start(tmp_path: Path, what: str, *flags: str) -> subprocess.Popen[str]:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    words = ["--ray", "--nproc", "2", "--cpu", *flags, str(script), str(tmp_path), what, "--lr", "1e-3"]
    clean = {name: value for name, value in environment().items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [*COMMAND, *words], env=clean, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def pids(tmp_path: Path, process: subprocess.Popen[str]) -> list[int]:
    """The processes of both ranks, once they train."""
    deadline = time.monotonic() + LIMIT_S
    while len(list(tmp_path.glob("pid-?"))) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.1)
    return [int((tmp_path / f"pid-{rank}").read_text()) for rank in (0, 1)]


def test_two_ranks_meet_on_the_loopback_after_a_failed_first_try(tmp_path: Path) -> None:
    process = start(tmp_path, "once", "--max-restarts", "1")
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert found[:6] == [rank, 2, 3.0, "__main__", ["--lr", "1e-3"], []]
        assert f"rank {rank} is here" in out
        addresses, programs = map(set, zip(*found[6], strict=True))
        assert {"raylet", "gcs_server"} <= programs
        assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1"}, found[6]


def test_the_traceback_of_the_failing_rank_comes_once_with_its_exit_code(tmp_path: Path) -> None:
    process = start(tmp_path, "fail")
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert len(re.findall(r"\) (?:\[rank1\]: )?ValueError: on purpose$", err, flags=re.MULTILINE)) == 1, err
    assert err.rstrip().endswith(
        "lockstep: rank 1 failed first (ValueError: on purpose); the other process was ended."
    )


def test_a_stop_signal_saves_on_all_ranks_and_a_killed_launcher_leaves_nobody(tmp_path: Path) -> None:
    process = start(tmp_path, "train")
    pids(tmp_path, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, err
    assert len(re.findall("all ranks stopped after", err)) == 1
    assert list((tmp_path / "run").rglob("checkpoint_0"))
    for path in tmp_path.glob("pid-?"):
        path.unlink()
    process = start(tmp_path, "train")
    workers = pids(tmp_path, process)
    os.kill(process.pid, signal.SIGKILL)
    assert wait_until(lambda: not any(alive(pid) for pid in workers), LIMIT_S) < 2.0
    process.communicate(timeout=LIMIT_S)
