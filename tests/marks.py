"""Cases and examples that ``make exhaustive`` runs beside those of ``make test``."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import hypothesis
import pytest


def again(*values: Any) -> Any:
    """A case that proves again, with more ranks or in another product of settings, what others prove."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def again_if(cases: Iterable[Any], repeated: Container[Any]) -> list[Any]:
    """The cases, of which those in ``repeated`` prove what others prove."""
    marks = pytest.mark.exhaustive
    return [pytest.param(case, marks=marks if case in repeated else ()) for case in cases]


def examples(count: int, **options: Any) -> hypothesis.settings:
    """How many examples hypothesis takes; more of them in the profile of ``make exhaustive`` (``conftest.py``)."""
    count = count * hypothesis.settings.default.max_examples // 100
    return hypothesis.settings(max_examples=count, **options)
