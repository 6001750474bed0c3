"""The real Slurm with two nodes, both this machine."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.testing import free_port
from tests.cluster.daemons import slurm
from tests.launch import training
from tests.launch.fakes import CANARY, canaries
from tests.launch.helpers import COMMAND, alive, environment, pids_in, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
STEPS = """
import time, torch
from lockstep import Accelerator, ProjectConfiguration
project = ProjectConfiguration("run", automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=project)
model = accelerator.prepare(torch.nn.Linear(2, 1))
optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(10_000):
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step(); optimizer.zero_grad()
    if step == 150:
        open(f"going-{accelerator.process_index}", "w").close()
    accelerator.check_preemption()
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm(tmp_path_factory.mktemp("slurm")) as found:
        yield found


def call(cluster: dict[str, str], *words: object, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in words]
    environ = environment(OMP_NUM_THREADS="1", **cluster, **extra)
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)


def job_of(*words: object) -> list[object]:
    """The command that submits a job on two nodes."""
    meeting = f"127.0.0.1:{free_port()}"
    return [*COMMAND, "--slurm", "--nnodes", 2, "--nproc", 1, "--rdzv", meeting, "--cpu", *words]


def test_a_step_on_two_nodes_trains(
    cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    training.write_script(tmp_path)
    words = ["a b", "$(touch pwned)", "'\"\n;`x`", "-o", "é"]
    meeting = f"127.0.0.1:{free_port()}"
    line = [*COMMAND, "--slurm", "--nproc", 1, "--rdzv", meeting, "--cpu", "train.py", *words]
    done = call(cluster, "salloc", "-Q", "-N2", *line, **canaries())
    assert done.returncode == training.EXIT_CODE, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[machine 0] trained 0", "[machine 1] trained 1"]
    assert len(re.findall(r"rank 1 .*failed", done.stderr)) == 1
    assert CANARY not in done.stdout + done.stderr
    training.check_results(tmp_path, words)
    assert not (tmp_path / "pwned").exists()


def test_a_submitted_job_trains_and_slurm_keeps_no_secret(
    cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    training.write_script(tmp_path)
    words = ["a b", "\n#SBATCH --nodes=9", "$HOME\t'\"", "é"]
    options = ["--slurm-option", "wait=", "--slurm-option", "output=job.out"]
    line = job_of(*options, "train.py", *words)
    done = call(cluster, *line, **canaries())
    assert done.returncode == training.EXIT_CODE, done.stderr
    assert "Submitted batch job" in done.stdout
    output = (tmp_path / "job.out").read_text()
    assert "[machine 0] trained 0" in output and "[machine 1] trained 1" in output
    training.check_results(tmp_path, words)
    kept = [path for path in Path(cluster["SLURM_CONF"]).parent.rglob("*") if path.is_file()]
    assert [path for path in kept if CANARY.encode() in path.read_bytes()] == []


def test_a_signal_to_the_job_saves_it_and_puts_it_back_into_the_queue(
    cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.py").write_text(STEPS)
    options = ["--slurm-option", "output=job.out", "--slurm-option", "after-stop=requeue"]
    line = job_of(*options, "steps.py")
    job = call(cluster, *line).stdout.split()[-1]
    going = [tmp_path / f"going-{rank}" for rank in range(2)]
    try:
        wait_until(lambda: all(path.exists() for path in going), 90)
        call(cluster, "scancel", "--signal=USR1", job)
        wait_until(lambda: "Restarts=1" in call(cluster, "scontrol", "show", "job", job).stdout, 60)
    finally:
        call(cluster, "scancel", "--signal=KILL", "--full", job)
    assert (tmp_path / "job.out").read_text().count("all ranks stopped") == 1


def test_killing_the_launcher_ends_the_workers_on_all_nodes(
    cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pids").mkdir()
    script = "import os, time; open(f'pids/{os.getpid()}', 'w').close(); time.sleep(600)"
    meeting = f"127.0.0.1:{free_port()}"
    line = [
        *COMMAND,
        "--slurm",
        "--nproc",
        "1",
        "--rdzv",
        meeting,
        "--no-python",
        sys.executable,
        "-c",
        script,
    ]
    inside = tmp_path / "inside.sh"
    inside.write_text(f"#!/bin/sh\necho $$ > launcher\nexec {shlex.join(line)}\n")
    inside.chmod(0o755)
    started = subprocess.Popen(
        ["salloc", "-Q", "-N2", str(inside)],
        env=environment(**cluster),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        workers = pids_in(tmp_path / "pids", 2)
        os.kill(int((tmp_path / "launcher").read_text()), signal.SIGKILL)
        wait_until(lambda: not any(alive(pid) for pid in workers), 2)
    finally:
        started.terminate()
        started.wait(60)
