"""Results of cells, compared: how far numbers and weights are from those of other runs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch


def difference(
    here: Path, there: Path, goes_on: bool = False, apart: Collection[str] = ()
) -> tuple[float, float]:
    """The greatest relative difference of a logged number, and of a weight. ``apart``: numbers that may differ."""
    logged, weights = torch.load(here / "result.pt")
    logged_there, weights_there = torch.load(there / "result.pt")
    if goes_on:  # what was logged since
        logged_there = logged_there[len(logged_there) - len(logged) :]
    assert [sorted(line) for line in logged] == [sorted(line) for line in logged_there]
    assert logged and list(weights) == list(weights_there)
    numbers = max(
        abs(value - other[key]) / max(abs(other[key]), 1e-6)
        for line, other in zip(logged, logged_there, strict=True)
        for key, value in line.items()
        if key not in apart
    )
    largest = max(float(value.abs().max()) for value in weights_there.values() if value.numel())
    return numbers, max(_apart(value, weights_there[name], largest) for name, value in weights.items())


def _apart(one: torch.Tensor, other: torch.Tensor, largest: float) -> float:
    """Relative to the tensor, or to a hundredth of the model's largest weight: some biases only gather rounding."""
    one, other = one.double(), other.double()
    if not other.numel():
        return 0.0
    return float((one - other).abs().max()) / max(float(other.abs().max()), largest / 100)
