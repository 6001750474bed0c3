"""Fixtures that all tests share."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.distributed.pool import WorkerPool


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
