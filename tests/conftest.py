"""Fixtures that all tests share."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from lockstep.testing import WorkerPool
from tests.warm_interpreter import WarmInterpreter

# On a busy machine the time that examples take says nothing of the code. In CI each run takes the same examples.
for name, examples in (("usual", 100), ("exhaustive", 500)):
    hypothesis.settings.register_profile(
        name,
        max_examples=examples,
        deadline=None,
        derandomize="CI" in os.environ,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("usual")  # --hypothesis-profile loads another one after this


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
