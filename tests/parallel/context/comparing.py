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


Result = tuple[float, dict[str, Tensor]]
"""Loss and gradients."""


def verdicts(
    found: Mapping[str, str | Result],
    expected: Mapping[str, Result],
    difference: Callable[[dict[str, Tensor], dict[str, Tensor]], float],
    of_loss: float,
    of_gradients: float,
) -> dict[str, tuple[str, str]]:
    """Model -> (equal, refused or differs; what is said); the last two are how far loss and gradients may differ."""
    said = {}
    for name, result in found.items():
        if isinstance(result, str):
            said[name] = ("refused", result)
            continue
        loss, gradients = expected[name]
        apart = difference(result[1], gradients)
        is_equal = abs(result[0] - loss) <= of_loss and apart <= of_gradients
        text = f"loss {result[0]} instead of {loss}, gradients are off by {apart:.2g}"
        said[name] = ("equal", "") if is_equal else ("differs", text)
    return said


def what_is_wrong(said: Mapping[str, tuple[str, str]], refused: Mapping[str, str]) -> list[str]:
    """``refused``: patterns; all other models must be equal."""
    return [
        f"{name} is not refused for its reason: {text}" if name in refused else f"{name} {word}: {text}"
        for name, (word, text) in said.items()
        if word != ("refused" if name in refused else "equal") or not re.search(refused.get(name, ""), text)
    ]
