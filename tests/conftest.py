"""Fixtures that all tests share."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import WorkerPool
from tests.warm_interpreter import WarmInterpreter

REPEATED_ON_FOUR_RANKS = {
    "test_expert_parallel.py",
    "test_quantized.py",
    "test_window.py",
    "test_window_sharded.py",
    "test_zero_communication.py",
    "test_zero_memory.py",
    "test_zero_models.py",
    "test_zero_precision.py",
}
"""Tests of these files prove on 2 ranks what they prove again on 4, which is left to ``make exhaustive``."""


PROVEN_ELSEWHERE = (
    "under_torchrun",  # tests/test_readme.py starts a script in these ways
    "started[torchrun]",
    "started[lockstep launch]",
    # two of four with replicate=2
    "predicted_and_hardly_less[4-zero=1 replicate=2-no-3]",
    "predicted_and_hardly_less[4-zero=3 replicate=2-bf16-1]",
    # with one micro-batch on 4 ranks, and with three on 2
    "training_equals_plain_single_process_training[4x-zero=1-accumulate3]",
    "training_equals_plain_single_process_training[4x-zero=2-accumulate3]",
    "training_equals_plain_single_process_training[4x-zero=3-accumulate3]",
    "training_equals_plain_single_process_training[4x-llama-pp=2-tp=2-adamw-accumulate1]",  # examples/gpt/split.py
    "half_precision_learns_as_one_process_does[bf16]",  # fp16 has a loss scaler on top
    "every_other_stage_and_number_of_ranks[4-zero=3]",
    "machines_that_die_come_back_and_are_cut_off",  # tests/launch/test_elastic.py without network namespaces
    "a_signal_stops_all_ranks_at_a_step_whose_state",  # tests/watch/hang/test_stop_signals.py
    "as_if_it_had_not[2-2]",  # tests/faults
    "finds_what_is_wrong_with_a_careless_writer[replaces_file_by_file",
    "finds_what_is_wrong_with_a_careless_writer[replaces_in_place",  # the two others show what the harness sees
    "the_gpt_has_one_loss_under_every_stage",  # tests/parallel/test_zero_parity.py and test_zero_communication.py
)
"""Parts of names of long tests that other tests make superfluous; for ``make exhaustive``."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(part in item.nodeid for part in PROVEN_ELSEWHERE):
            item.add_marker(pytest.mark.exhaustive)
        values = getattr(getattr(item, "callspec", None), "params", {})
        ranks = [values.get(name) for name in ("world_size", "ranks", "size")]
        needs_four = any(word in str(values) for word in ("replicate", "hpz"))
        if item.path.name in REPEATED_ON_FOUR_RANKS and 4 in ranks and not needs_four:
            item.add_marker(pytest.mark.exhaustive)
        if item.path.name == "test_zero_models.py" and values.get("accumulation") == 3:
            item.add_marker(pytest.mark.exhaustive)  # with one micro-batch they are always run
        if item.path.name == "test_split_parity.py" and "2x-llama-pp=2-schedule=" in item.nodeid:
            item.add_marker(pytest.mark.exhaustive)  # pipeline/test_pipeline.py has every schedule


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[WorkerPool]:
    """The warm workers of this session; started when first used."""
    pool = WorkerPool()
    atexit.register(pool.close)  # multiprocessing would otherwise wait for them at exit
    yield pool
    pool.close()


@pytest.fixture
def run_distributed(worker_pool: WorkerPool) -> Callable[..., list[Any]]:
    """``run_distributed(fn, world_size, *args, timeout_s=60, **kwargs)``: the results, rank by rank."""
    return worker_pool.run


@pytest.fixture(scope="session")
def warm_interpreter() -> Iterator[WarmInterpreter]:
    """Runs scripts one after the other, without the settings of whoever runs the tests."""
    interpreter = WarmInterpreter(
        {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "LOCKSTEP_CONFIG_FILE": "",
            "XDG_CONFIG_HOME": "/nonexistent",
        }
    )
    yield interpreter
    interpreter.close()
