"""Fixtures of the tests that look at the output of one rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lockstep.runtime import Runtime
from tests.patching import module_of


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Runtime]:
    """``as_rank(rank, world_size=2, local_rank=None)``: this process is there, without a group."""

    def stand(rank: int, world_size: int = 2, local_rank: int | None = None) -> Runtime:
        local = rank if local_rank is None else local_rank
        runtime = Runtime(rank, world_size, local, world_size, torch.device("cpu"), None)
        monkeypatch.setattr(module_of(Runtime), "current_runtime", lambda: runtime)
        return runtime

    return stand


@pytest.fixture(autouse=True)
def _without_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of(Runtime), "current_runtime", lambda: None)
