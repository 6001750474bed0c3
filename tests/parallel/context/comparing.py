"""Tables of models: each is right on a split sequence, or refused for its reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from torch import Tensor


def fast_and_all(fast: tuple[str, ...], every: Iterable[str]) -> list[Any]:
    """Values of a parameter: those of ``every`` that always run, and the others."""
    others = tuple(name for name in every if name not in fast)
    return [
        pytest.param(fast, id="fast"),
        pytest.param(others, id="all", marks=pytest.mark.exhaustive),
    ]


def what_is_wrong(
    found: Mapping[str, Any],
    expected: Mapping[str, tuple[float, dict[str, Tensor]]],
    refused: Mapping[str, str],
    difference: Callable[[dict[str, Tensor], dict[str, Tensor]], float],
    of_loss: float,
    of_gradients: float,
) -> list[str]:
    """``found``: a message, or loss and gradients, whose differences may be the last two; ``refused``: patterns."""
    wrong = []
    for name, result in found.items():
        if name in refused:
            if not isinstance(result, str) or not re.search(refused[name], result):
                wrong.append(f"{name} is not refused for its reason: {result}")
            continue
        if isinstance(result, str):
            wrong.append(f"{name} is refused: {result}")
            continue
        loss, gradients = expected[name]
        apart = difference(result[1], gradients)
        if abs(result[0] - loss) > of_loss or apart > of_gradients:
            wrong.append(f"{name}: loss {result[0]} instead of {loss}, gradients are off by {apart:.2g}")
    return wrong
