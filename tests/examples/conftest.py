"""Runs examples in warm workers."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from lockstep.testing import WorkerPool
from tests.examples.scripts import Run, run_here


@pytest.fixture(scope="session")
def run(worker_pool: WorkerPool) -> Run:
    """``run(processes, script, *arguments)``: what the script prints on all of them.

    In workers that are there already. Launchers, whose start takes longer than most scripts, are tested in
    tests/launch.
    """

    def run_on(
        processes: int,
        script: str,
        *arguments: object,
        is_launched: bool = False,
        environment: Mapping[str, str] | None = None,
        dtype: str = "float32",
    ) -> str:
        words = list(map(str, arguments))
        is_launched |= processes > 1
        return "".join(
            worker_pool.run(
                run_here, processes, script, words, is_launched, environment, dtype, timeout_s=150
            )
        )

    return run_on
