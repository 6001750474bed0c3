"""Fixtures for pytest: ``pytest_plugins = ["lockstep.testing.fixtures"]`` in a ``conftest.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from lockstep.testing.parity import ParityWorkers
from lockstep.testing.report import ParityReport


@pytest.fixture(scope="session")
def parity_workers() -> Iterator[ParityWorkers]:
    """Give the warm processes of this session, which start when they are first used."""
    with ParityWorkers() as workers:
        yield workers


@pytest.fixture
def check_parity(parity_workers: ParityWorkers) -> Callable[..., ParityReport]:
    """Run ``lockstep.testing.check_parity`` in the processes of this session."""
    return parity_workers.check_parity
