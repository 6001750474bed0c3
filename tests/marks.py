"""Cases and examples that ``make exhaustive`` runs beside those of ``make test``."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from torch.distributed.fsdp import FSDPModule


def again(*values: Any) -> Any:
    """A case that proves again, with more ranks or in another product of settings, what others prove."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def examples(count: int, **options: Any) -> hypothesis.settings:
    """How many examples hypothesis takes; more of them in the profile of ``make exhaustive`` (``conftest.py``)."""
    count = count * hypothesis.settings.default.max_examples // 100
    return hypothesis.settings(max_examples=count, **options)


needs_a_restart = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"),
    reason="only torch 2.13 or newer can go on; that older ones are refused is tested in test_refusals.py",
)
"""Of tests in which a sharded model goes on after a forward that raised."""
