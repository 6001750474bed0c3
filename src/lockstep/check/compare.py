"""What differs between a pass of the split model and one of the whole model, by more than rounding explains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.check.observe import Observations, Observed
from lockstep.check.passes import PassResult

RELATIVE = {torch.float64: 1e-7, torch.float32: 1e-3}
"""Of a gradient's norm; other types are rounded at each operation."""
RELATIVE_ROUNDED = 0.25
"""Where the model's own weights have 16 bits."""
TIMES_ROUNDING = 3
"""The distance of the split model may be so many times that of the whole one with its weights and products rounded."""
LEAST_EPS = 2
"""Times the precision of the type that it is rounded to, at least."""
OF_LOSS, OF_OUTPUTS = 0.03, 0.1
"""Times the tolerance of gradients."""
SMALLEST = 1e-2
"""Times the largest mean gradient of the model: of smaller gradients this is taken for the size."""

STATE = ("buffer", "attribute")

GradientSums = dict[str, tuple[float, float]]
"""Name -> (sum, norm) of each gradient that a rank holds whole."""


@dataclass(frozen=True)
class Difference:
    """``kind``: loss, output, gradient, replica, buffer or attribute; numbers of the split and of the whole model."""

    kind: str
    name: str
    found: Any = None
    expected: Any = None
    relative: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """``module``: where the first difference arises; "" is the model's own forward, None: unknown."""

    differences: tuple[Difference, ...]
    gradients: int
    module: str | None = None
    has_loss: bool = False


@dataclass(frozen=True)
class Rounded:
    """What rounding explains: the pass of the whole model whose weights and products are rounded to ``dtype``."""

    result: PassResult
    dtype: torch.dtype

    def of_gradients(self, whole: Mapping[str, Tensor]) -> dict[str, float]:
        """Tolerance of each gradient: its own distance by rounding, or the median of all if that is larger."""
        apart = {name: relative for name, relative, _, _ in _distances(self.result.gradients, whole)}
        # One pass may spare a gradient by chance: what is usual of the others is allowed to it as well.
        median = sorted(apart.values())[len(apart) // 2] if apart else 0.0
        return {name: self._tolerance_of(max(relative, median)) for name, relative in apart.items()}

    def of_output(self, path: str, expected: Tensor) -> float:
        """Tolerance of an output, of any shape, or of the loss."""
        found = self.result.outputs.get(path)
        is_there = found is not None and found.shape == expected.shape
        return self._tolerance_of(_distance(found, expected, 0.0) if is_there and found is not None else 0.0)

    def _tolerance_of(self, relative: float) -> float:
        return max(TIMES_ROUNDING * relative, LEAST_EPS * torch.finfo(self.dtype).eps)


def compare_with_whole(
    split: PassResult,
    whole: PassResult,
    digests: Sequence[GradientSums],
    ranks: Sequence[Observed],
    tolerance: float,
    rounded: Rounded | None = None,
) -> Comparison:
    """All differences: of state, the loss, outputs, gradients and copies of them; gradients of the last module first.

    ``ranks``: what each rank of the split model has seen. ``rounded`` says better than ``tolerance`` what is allowed.
    """
    observations = Observations(ranks, whole.observed)
    order = observations.order()
    gradients = [
        *_of_gradients(split.gradients, whole.gradients, tolerance, rounded),
        *_of_replicas(digests, tolerance),
    ]
    # Backward begins at the last module: its gradient is the first to be wrong.
    gradients.sort(key=lambda difference: -order.get(_owner(difference), -1))
    # State first: what a forward changes otherwise explains other outputs, and these other gradients.
    found = [
        *_of_buffers(split.buffers, whole.buffers, tolerance),
        *_of_attributes(split.attributes, whole.attributes),
        *_of_outputs(split, whole, tolerance, rounded),
        *gradients,
    ]
    where = _first_module(observations, found) if found else None
    return Comparison(tuple(found), len(whole.gradients), where, whole.loss is not None)


def tolerance_of(dtypes: set[torch.dtype], computes_in_half: bool) -> float:
    """For numbers of these types."""
    if computes_in_half:
        return RELATIVE_ROUNDED
    return max((RELATIVE.get(dtype, RELATIVE_ROUNDED) for dtype in dtypes), default=RELATIVE[torch.float32])


def digest(gradients: Mapping[str, Tensor]) -> GradientSums:
    """Sum and norm of each gradient, of whatever shape, by its name."""
    return {
        name: (gradient.double().sum().item(), gradient.double().norm().item())
        for name, gradient in gradients.items()
    }


def _of_outputs(
    split: PassResult, whole: PassResult, tolerance: float, rounded: Rounded | None
) -> Iterator[Difference]:
    for path, expected in whole.outputs.items():
        found = split.outputs.get(path)
        kind = "loss" if path == whole.loss else "output"
        if found is None and path not in split.outputs:
            # A pipeline that trains returns the loss alone.
            continue
        if found is None or found.shape != expected.shape:
            shape = None if found is None else tuple(found.shape)
            yield Difference(kind, path, shape, tuple(expected.shape), math.inf)
            continue
        relative = _distance(found, expected, 0.0)
        allowed = _of_forward(tolerance, kind) if rounded is None else rounded.of_output(path, expected)
        if relative > allowed:
            yield Difference(kind, path, _number_of(found), _number_of(expected), relative)


def _of_forward(tolerance: float, kind: str) -> float:
    """Forwards are rounded less than gradients, unless each operation is rounded coarsely."""
    if tolerance >= RELATIVE_ROUNDED:
        return OF_OUTPUTS * tolerance
    return tolerance * (OF_LOSS if kind == "loss" else OF_OUTPUTS)


def _of_gradients(
    split: Mapping[str, Tensor], whole: Mapping[str, Tensor], tolerance: float, rounded: Rounded | None
) -> Iterator[Difference]:
    allowed = {} if rounded is None else rounded.of_gradients(whole)
    for name, relative, found, expected in _distances(split, whole):
        if not math.isfinite(relative) and found.shape != expected.shape:
            yield Difference("gradient", name, tuple(found.shape), tuple(expected.shape), math.inf)
        elif relative > allowed.get(name, tolerance):
            norms = found.double().norm().item(), expected.double().norm().item()
            yield Difference("gradient", name, *norms, relative)


def _distances(
    split: Mapping[str, Tensor], whole: Mapping[str, Tensor]
) -> Iterator[tuple[str, float, Tensor, Tensor]]:
    """(name, relative distance, found, expected) of each gradient."""
    # Root mean squares; a part of the largest is the floor below which relative distances say nothing.
    sizes = [g.double().norm().item() / math.sqrt(max(g.numel(), 1)) for g in whole.values()]
    floor = SMALLEST * max(sizes, default=0.0)
    for name, expected in whole.items():
        found = split.get(name)
        if found is None:
            found = torch.zeros_like(expected)
        if found.shape != expected.shape:
            yield name, math.inf, found, expected
        else:
            yield (
                name,
                _distance(found, expected, floor * math.sqrt(max(expected.numel(), 1))),
                found,
                expected,
            )


def _of_replicas(digests: Sequence[GradientSums], tolerance: float) -> Iterator[Difference]:
    for name in {name: None for one in digests for name in one}:
        values = [one[name] for one in digests if name in one]
        norm = max(norm for _, norm in values)
        sums = [total for total, _ in values]
        norms = [one for _, one in values]
        # A sum of n elements may be off by up to the root of n times the norm of what they are off by.
        if max(norms) - min(norms) > tolerance * norm or max(sums) - min(sums) > tolerance * norm * 10:
            yield Difference("replica", name, min(norms), max(norms))


def _of_buffers(
    split: Mapping[str, Tensor], whole: Mapping[str, Tensor], tolerance: float
) -> Iterator[Difference]:
    for name, expected in whole.items():
        found = split.get(name)
        if found is None or found.shape != expected.shape:
            # A cache that the forward makes as large as what it needs.
            continue
        if _distance(found, expected, 0.0) > tolerance:
            yield Difference("buffer", name, _number_of(found), _number_of(expected))


def _of_attributes(split: Mapping[str, object], whole: Mapping[str, object]) -> Iterator[Difference]:
    for name, expected in whole.items():
        found = split.get(name, expected)
        if isinstance(expected, float) and isinstance(found, (int, float)):
            both_nan = math.isnan(found) and math.isnan(expected)
            same = both_nan or math.isclose(found, expected, rel_tol=1e-3, abs_tol=1e-9)
        else:
            same = found == expected
        if not same:
            yield Difference("attribute", name, found, expected)


def _number_of(tensor: Tensor) -> object:
    return tensor.item() if tensor.numel() == 1 else None


def _distance(found: Tensor, expected: Tensor, floor: float) -> float:
    """Norm of the difference by the larger of the norm and ``floor``; equal infinities and NaNs count as equal."""
    a, b = found.double(), expected.double()
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    apart = torch.where(same, 0.0, a - b).norm().item()
    norm = torch.where(b.isfinite(), b, 0.0).norm().item()
    return apart / max(norm, floor, 1e-30) if math.isfinite(apart) else math.inf


def _first_module(observations: Observations, found: list[Difference]) -> str | None:
    """Where it goes wrong: what keeps other state; else the first in forward, or in backward."""
    for difference in found:
        if difference.kind in STATE:
            return _owner(difference)
    if any(difference.kind in ("loss", "output") for difference in found):
        return observations.first_forward()
    return observations.last_backward(_owner(difference) for difference in found)


def _owner(difference: Difference) -> str:
    return difference.name.rpartition(".")[0]
