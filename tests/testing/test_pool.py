"""The test harness itself: what it reports when ranks fail, hang or die."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.testing import DistributedTestError, WorkerPool
from tests.refusals import expect_refusal


def summed_rank() -> float:
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


def fail_on(rank: int) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == rank:
        raise ValueError("the cause")
    dist.barrier()


def compare_unequal() -> None:
    found, expected = 3, 4
    assert found == expected


def hang_in_a_collective() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        named_sleep()
    dist.barrier()


def named_sleep() -> None:
    time.sleep(1000)


def die_on(rank: int) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def print_and_fail() -> None:
    print("a line on stdout")
    raise SystemExit(3)


def disturb_the_process() -> None:
    dist.init_process_group("gloo")
    os.environ["LEFT_BEHIND"] = "yes"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    random.random()
    torch.rand(1)


def look_at_the_process() -> tuple[bool, str | None, torch.dtype, bool, float, float]:
    left = os.environ.get("LEFT_BEHIND")
    drawn = random.random(), torch.rand(1).item()
    return dist.is_initialized(), left, torch.get_default_dtype(), torch.is_grad_enabled(), *drawn


def return_a_function() -> object:
    return lambda: None


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_runs_in_one_process_group(run_distributed, world_size):
    assert run_distributed(summed_rank, world_size) == [sum(range(world_size))] * world_size


def test_more_ranks_than_workers_are_refused(run_distributed):
    expect_refusal(ValueError, "5", run_distributed, summed_rank, 5)


def test_the_rank_that_failed_first_is_named_first_with_its_traceback(run_distributed):
    with pytest.raises(DistributedTestError) as caught:
        run_distributed(fail_on, 2, 1)
    text = str(caught.value)
    assert "fail_on failed first on rank 1 of 2" in text.splitlines()[0]
    assert "rank 1 raised" in text.splitlines()[2]
    assert 'raise ValueError("the cause")' in text
    assert run_distributed(summed_rank, 2) == [1.0, 1.0]


def test_a_failed_assertion_shows_the_variables_around_it(run_distributed):
    with pytest.raises(DistributedTestError, match="found = 3\n +expected = 4"):
        run_distributed(compare_unequal, 1)


def test_what_a_failing_rank_printed_is_shown_and_an_exit_is_a_failure(run_distributed):
    with pytest.raises(DistributedTestError, match="(?s)SystemExit: 3.*a line on stdout"):
        run_distributed(print_and_fail, 1)


def test_a_hang_shows_the_stacks_of_all_ranks_and_the_pool_goes_on(run_distributed):
    started = time.monotonic()
    with pytest.raises(DistributedTestError) as caught:
        run_distributed(hang_in_a_collective, 2, timeout_s=2)
    assert time.monotonic() - started < 10
    text = str(caught.value)
    assert "did not end within 2 s on rank 0, 1 of 2" in text
    rank_0, rank_1 = text.split("---- rank 1")[:2]
    assert "named_sleep" in rank_0
    assert "barrier" in rank_1 and "hang_in_a_collective" in rank_1
    assert run_distributed(summed_rank, 2) == [1.0, 1.0]


def test_a_killed_worker_is_reported_and_replaced(run_distributed):
    with pytest.raises(DistributedTestError, match="(?s)rank 1 of 2.*exit code -9"):
        run_distributed(die_on, 2, 1)
    assert run_distributed(summed_rank, 2) == [1.0, 1.0]


def test_a_worker_killed_between_tests_is_replaced(run_distributed, worker_pool: WorkerPool):
    run_distributed(summed_rank, 2)
    worker = worker_pool.workers[1]
    os.kill(worker.pid, signal.SIGKILL)
    worker.process.join()
    assert run_distributed(summed_rank, 2) == [1.0, 1.0]


def test_a_test_leaves_nothing_behind_for_the_next(run_distributed):
    before = run_distributed(look_at_the_process, 2)
    run_distributed(disturb_the_process, 2)
    assert run_distributed(look_at_the_process, 2) == before
    assert before[0][:4] == (False, None, torch.float32, True)


def test_a_result_that_cannot_be_sent_is_a_failure(run_distributed):
    expect_refusal(DistributedTestError, "pickle", run_distributed, return_a_function, 1)


def test_workers_die_with_the_process_that_started_them(tmp_path: Path):
    script = tmp_path / "owner.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, threading, time
            from lockstep.testing import WorkerPool
            from tests.testing.test_pool import hang_in_a_collective, summed_rank

            if __name__ == "__main__":
                pool = WorkerPool()
                pool.run(summed_rank, 2)
                print(*(worker.pid for worker in pool.workers), flush=True)
                threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
                pool.run(hang_in_a_collective, 2)
            """
        )
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    """Whether the process exists and is more than an entry that its parent has yet to collect."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
