"""Launches beside busy processes, whose launchers and ranks are paused: none is ended, and nothing false is said."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import helpers as launch

SCRIPT = """
import os, sys, time, torch
from lockstep import Accelerator
accelerator = Accelerator(cpu=True)
open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(40)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.randn(4000, 8), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
began = time.monotonic()
for step, batch in enumerate(loader):
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if accelerator.gather(torch.tensor([time.monotonic() - began > 15.0])).any():
        break
if len(sys.argv) > 2 and accelerator.is_main_process:
    open(f"{sys.argv[1]}/hangs", "w").close()
    accelerator.gather(torch.zeros(1))
accelerator.end_training()
"""
# What is true of a rank, or a launcher, that was stopped.
TRUE = re.compile(
    r"ranks? [\d, -]+ (is|are) stopped \(SIGSTOP or a debugger|The ranks went on after|"
    r"its launcher, which has not answered"
)
LAUNCHES, BUSY, LIMIT_S = 20, 20, 420.0
AT_ONCE = (2, 2, 4, 16)
"""The ranks of the launches that run beside each other."""
HANGS = 5
"""One launch in so many ends in a collective of rank 0 alone, which is named."""


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def pause_some(launcher: subprocess.Popen[str], folder: Path, draw: random.Random) -> int:
    """Stop the launcher and ranks, one after the other, for 1 to 20 s each, until the launch is over."""
    pauses = 0
    while launcher.poll() is None:
        time.sleep(draw.uniform(1.0, 5.0))
        if (folder / "hangs").exists():
            launcher.wait()
            break
        pids = [launcher.pid, *(int(path.name) for path in folder.iterdir())]
        pid = draw.choice(pids)
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(draw.uniform(1.0, 20.0))
            pauses += 1
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)
    return pauses


def run_one(number: int, ranks: int, folder: Path) -> tuple[int, int, int, str]:
    """Run one launch: its ranks, exit code and pauses, and the lines that it should not have printed."""
    draw = random.Random(number)
    pids = folder / str(number)
    pids.mkdir()
    hang = ["hang"] if number % HANGS == 0 else []
    launcher = launch.start("--nproc", ranks, "--cpu", folder / "train.py", pids, *hang, OMP_NUM_THREADS="1")
    pauses = pause_some(launcher, pids, draw)
    code, error = launcher.returncode, launcher.communicate()[1]
    lines = [line for line in error.splitlines() if line.strip() and not TRUE.search(line)]
    if hang and code != 0 and "Call Accelerator.gather on every rank (train.py:19)" in error:
        code, lines = 0, []
    return ranks, code, pauses, "\n".join(lines)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_no_launch_is_ended_or_accused_beside_busy_processes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    until = time.monotonic() + LIMIT_S
    found: list[tuple[int, int, int, str]] = []
    numbers = iter(range(LAUNCHES))
    lock = threading.Lock()

    def work(ranks: int) -> None:
        while time.monotonic() < until:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            found.append(run_one(number, ranks, tmp_path))
            print(found[-1], flush=True)

    with busy_processes(BUSY):
        threads = [threading.Thread(target=work, args=(ranks,), daemon=True) for ranks in AT_ONCE]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(f"{len(found)} launches, {sum(pauses for _, _, pauses, _ in found)} pauses")
    assert found
    assert [one for one in found if one[1] != 0 or one[3]] == []
