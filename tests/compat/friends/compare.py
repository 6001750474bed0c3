"""Results of cells, compared: how far numbers and weights are from those of other runs."""

from __future__ import annotations

import sys
from pathlib import Path

import torch


def difference(here: Path, there: Path) -> tuple[float, float]:
    """The greatest relative difference of a logged number, and of a weight (to the largest of its tensor)."""
    logged, weights = torch.load(here / "result.pt")
    logged_there, weights_there = torch.load(there / "result.pt")
    assert [sorted(line) for line in logged] == [sorted(line) for line in logged_there], (
        logged,
        logged_there,
    )
    assert logged and list(weights) == list(weights_there)
    numbers = max(
        abs(value - other[key]) / max(abs(other[key]), 1e-6)
        for line, other in zip(logged, logged_there, strict=True)
        for key, value in line.items()
    )
    return numbers, max(_apart(value, weights_there[name]) for name, value in weights.items())


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = one.double(), other.double()
    largest = float(other.abs().max()) if other.numel() else 0.0
    return float((one - other).abs().max()) / largest if largest else float(one.abs().sum())


if __name__ == "__main__":
    here, there = map(Path, sys.argv[1:3])
    for folder in sorted(here.iterdir()):
        if (folder / "result.pt").exists():
            name = folder.name.partition("-")[0]
            try:
                print(f"{folder.name:24} numbers %.1e weights %.1e" % difference(folder, there / name))
            except Exception as error:
                print(f"{folder.name:24} {type(error).__name__}: {str(error)[:300]}")
