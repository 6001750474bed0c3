"""SIGTERM, SIGUSR1 and SIGUSR2 stop a run at one step boundary, without any launcher of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lockstep.history import EVENTS, read_lines
from lockstep.testing import free_port
from tests.launch import helpers as launch

SCRIPT = Path(__file__).parent / "training.py"
EARLY = Path(__file__).parent / "early.py"
LIMIT_S = 60


def start(out: Path, world_size: int, *arguments: str) -> list[subprocess.Popen[str]]:
    out.mkdir(exist_ok=True)
    port = str(free_port())
    processes = []
    for rank in range(world_size):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP")}
        environment |= {"OMP_NUM_THREADS": "1"}
        if world_size > 1:
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
            environment |= {
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
        command = [sys.executable, str(SCRIPT), str(out), *arguments]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    return processes


def steps(out: Path, rank: int) -> list[list[int]]:
    path = out / f"rank-{rank}.txt"
    if not path.exists():
        return []
    return [[int(word) for word in line.split()] for line in path.read_text().splitlines()]


def wait_for_step(out: Path, step: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while len(steps(out, 0)) < step:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def end(processes: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    errors = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    return [process.returncode for process in processes], errors


def test_a_signal_to_any_rank_stops_all_at_one_step_and_the_next_start_goes_on(tmp_path: Path) -> None:
    for number, rank in [(signal.SIGUSR1, 1), (signal.SIGTERM, 0)]:
        processes = start(tmp_path, 2, "--steps", "40", "--pause", "0.02")
        before = len(steps(tmp_path, 0))
        wait_for_step(tmp_path, before + 3)
        processes[rank].send_signal(number)
        codes, errors = end(processes)
        assert codes == [75, 75], errors
        done = steps(tmp_path, 0)
        assert len(done) == len(steps(tmp_path, 1))
        assert before + 3 <= len(done) < 40
        said = [error for error in errors if "all ranks stopped" in error]
        assert len(said) == 1  # once, by rank 0
        assert f"after {len(done) - before} steps because of {number.name}" in said[0]
    events = [event for event in read_lines(tmp_path / "run" / EVENTS) if event["event"] != "checkpoint"]
    assert [(event["attempt"], event["event"]) for event in events if event["event"] != "peak"] == [
        *((0, name) for name in ("start", "stop", "end")),
        *((1, name) for name in ("restart", "start", "loaded", "stop", "end")),
    ]
    assert [event["reason"] for event in events if event["event"] == "stop"] == ["SIGUSR1", "SIGTERM"]
    samples = [sample for r in range(2) for _, *batch in steps(tmp_path, r) for sample in batch]
    assert len(set(samples)) == len(samples)  # none repeated
    assert [step for step, *_ in steps(tmp_path, 0)] == list(range(1, len(steps(tmp_path, 0)) + 1))


def test_one_process_stops_by_itself_also_without_a_place_to_save(tmp_path: Path) -> None:
    [process] = start(tmp_path, 1, "--steps", "100", "--pause", "0.02", "--plain")
    wait_for_step(tmp_path, 3)
    process.send_signal(signal.SIGUSR2)
    codes, [error] = end([process])
    assert codes == [128 + signal.SIGUSR2]
    assert "nothing was saved" in error


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    [process] = start(tmp_path, 1, "--steps", "100", "--pause", "2")
    wait_for_step(tmp_path, 1)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None  # in the middle of a step
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    codes, _ = end([process])
    assert codes == [128 + signal.SIGTERM]
    assert time.monotonic() - began < 2


# When rank 0 sends the signal, whether there is a place to save, and whether a checkpoint must be there afterwards.
MOMENTS = [
    ("import", "SIGTERM", True, False),
    ("step 0", "SIGUSR2", True, True),
]


def test_a_signal_to_the_launcher_around_the_first_step_ends_with_75_and_keeps_what_was_done(
    tmp_path: Path,
) -> None:
    launches = []
    for number, (when, name, has_place, _) in enumerate(MOMENTS):
        out = tmp_path / str(number)
        words = [when, int(signal.Signals[name]), out, *([] if has_place else ["plain"])]
        launches.append((out, launch.start("--nproc", 2, "--cpu", EARLY, *words, OMP_NUM_THREADS="1")))
    nothing = "before the first step of an Accelerator; nothing was saved"
    for (when, name, _, is_saved), (out, launched) in zip(MOMENTS, launches, strict=True):
        error = launched.communicate(timeout=4 * LIMIT_S)[1]
        assert launched.returncode == 75, (when, error)
        assert name in error
        assert bool(list(out.glob("checkpoints/checkpoint_0/*"))) == is_saved, (when, error)
        assert (nothing in error) == (when == "import"), error


def test_one_process_by_itself_stops_before_its_first_step_too(tmp_path: Path) -> None:
    """Once there is an Accelerator: before, the signal is the system's matter."""
    command = [sys.executable, str(EARLY), "prepared", str(int(signal.SIGTERM)), str(tmp_path / "out")]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=4 * LIMIT_S, check=False)
    assert done.returncode == 75
    assert "ended because of SIGTERM before its first step; there was nothing to save" in done.stderr
