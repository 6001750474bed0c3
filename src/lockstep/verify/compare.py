"""What differs between a pass of the split model and one of the whole model, by more than rounding explains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lockstep.verify.module_sums import Observations, Observed
from lockstep.verify.passes import PassResult
from lockstep.verify.rounding import MANY, Rounding, bounded, flipped, smallest
from lockstep.verify.trace.measure import compare

LEAST = {torch.float64: 1e-7, torch.float32: 1e-3}
"""Of a gradient's norm: what an element on the other side of a kink (a ReLU, a maximum) may come to. In these types so
few are that close to one that a disturbed run need not show it; for types of 16 bits see ``flipped``."""
OF_LOSS, OF_OUTPUTS = 0.03, 0.1
"""Times the same, for a loss and for an output."""

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


class RoundingLimits:
    """How far each number may be off, relative to its size: what rounding explains.

    Args:
        moved: The pass of the whole model with weights and inputs off by one rounding step.
        half: The type of 16 bits that the run computes in, if it does; otherwise it is that of the gradients.
        positions: Of the batch, at each of which a unit of a layer computes a number.
    """

    def __init__(
        self, whole: PassResult, moved: PassResult, half: torch.dtype | None = None, positions: int = 1
    ) -> None:
        dtypes = {gradient.dtype for gradient in whole.gradients.values()}
        dtype = half or max(dtypes, key=lambda one: torch.finfo(one).eps, default=torch.float32)
        self._rounding, self._least = Rounding.of(dtype), LEAST.get(dtype, 0.0)
        apart = _distances(moved.gradients, whole.gradients)
        self.gradients = self._of(
            {name: (relative, expected.numel()) for name, relative, _, expected in apart}
        )
        if dtype not in LEAST:
            for name, gradient in whole.gradients.items():
                kinks = flipped(positions, gradient.shape[0] if gradient.ndim else 1)
                self.gradients[name] = max(self.gradients[name], kinks)
        outputs = _spreads(moved.outputs, whole.outputs)
        self.outputs = self._of(outputs, OF_OUTPUTS)
        if whole.loss is not None:
            self.outputs |= self._of({whole.loss: outputs[whole.loss]}, OF_LOSS)
        self.buffers = self._of(_spreads(moved.buffers, whole.buffers))
        self.number = self._of({"": (0.0, 1)})[""]

    def _of(self, spreads: Mapping[str, tuple[float, int]], of_least: float = 1.0) -> dict[str, float]:
        """Return what is allowed of each tensor, by its (spread, elements)."""
        usual = median([spread for spread, _ in spreads.values()] or [0.0])
        found = {}
        for name, (own, elements) in spreads.items():
            # One pass may spare few elements by chance: what is usual of the others is allowed to them as well.
            spread = max(own, self._rounding.least, usual if elements < MANY else 0.0)
            allowed = bounded(self._rounding.allowed(spread, elements), spread, elements)
            found[name] = max(allowed, of_least * self._least)
        return found


def compare_with_whole(
    split: PassResult,
    whole: PassResult,
    digests: Sequence[GradientSums],
    ranks: Sequence[Observed],
    limits: RoundingLimits,
) -> Comparison:
    """Return all differences: of state, the loss, outputs, gradients and copies of them; gradients of the last module
    first.

    ``ranks``: what each rank of the split model has seen.
    """
    observations = Observations(ranks, whole.observed)
    order = observations.order()
    gradients = [
        *_of_gradients(split.gradients, whole.gradients, limits),
        *_of_replicas(digests, limits),
    ]
    # Backward begins at the last module: its gradient is the first to be wrong.
    gradients.sort(key=lambda difference: -order.get(_owner(difference), -1))
    # State first: what a forward changes otherwise explains other outputs, and these other gradients.
    found = [
        *_of_buffers(split.buffers, whole.buffers, limits),
        *_of_attributes(split.attributes, whole.attributes, limits),
        *_of_outputs(split, whole, limits),
        *gradients,
    ]
    where = _first_module(observations, found) if found else None
    return Comparison(tuple(found), len(whole.gradients), where, whole.loss is not None)


def digest(gradients: Mapping[str, Tensor]) -> GradientSums:
    """Sum and norm of each gradient, of whatever shape, by its name."""
    return {
        name: (gradient.double().sum().item(), gradient.double().norm().item())
        for name, gradient in gradients.items()
    }


def _of_outputs(split: PassResult, whole: PassResult, limits: RoundingLimits) -> Iterator[Difference]:
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
        relative = compare(found, expected).relative()
        if relative > limits.outputs[path]:
            yield Difference(kind, path, _number_of(found), _number_of(expected), relative)


def _of_gradients(
    split: Mapping[str, Tensor], whole: Mapping[str, Tensor], limits: RoundingLimits
) -> Iterator[Difference]:
    for name, relative, found, expected in _distances(split, whole):
        if not math.isfinite(relative) and found.shape != expected.shape:
            yield Difference("gradient", name, tuple(found.shape), tuple(expected.shape), math.inf)
        elif relative > limits.gradients[name]:
            norms = found.double().norm().item(), expected.double().norm().item()
            yield Difference("gradient", name, *norms, relative)


def _distances(
    split: Mapping[str, Tensor], whole: Mapping[str, Tensor]
) -> Iterator[tuple[str, float, Tensor, Tensor]]:
    """Yield (name, relative distance, found, expected) of each gradient."""
    usual = smallest(g.double().norm().item() / math.sqrt(max(g.numel(), 1)) for g in whole.values())
    for name, expected in whole.items():
        # Below its smallest normal number a type has no more digits: fp16 loses gradients below 6e-5 bit by bit.
        floor = max(usual, torch.finfo(expected.dtype).smallest_normal)
        found = split.get(name)
        if found is None:
            found = torch.zeros_like(expected)
        if found.shape != expected.shape:
            yield name, math.inf, found, expected
        else:
            yield name, compare(found, expected).relative(floor), found, expected


def _of_replicas(digests: Sequence[GradientSums], limits: RoundingLimits) -> Iterator[Difference]:
    for name in {name: None for one in digests for name in one}:
        values = [one[name] for one in digests if name in one]
        # A gradient that rank 0 alone does not have is compared as a single number is.
        allowed = limits.gradients.get(name, limits.number) * max(norm for _, norm in values)
        sums = [total for total, _ in values]
        norms = [one for _, one in values]
        # A sum of n elements may be off by up to the root of n times the norm of what they are off by.
        if max(norms) - min(norms) > allowed or max(sums) - min(sums) > 10 * allowed:
            yield Difference("replica", name, min(norms), max(norms))


def _of_buffers(
    split: Mapping[str, Tensor], whole: Mapping[str, Tensor], limits: RoundingLimits
) -> Iterator[Difference]:
    for name, expected in whole.items():
        found = split.get(name)
        if found is None or found.shape != expected.shape:
            # A cache that the forward makes as large as what it needs.
            continue
        if compare(found, expected).relative() > limits.buffers[name]:
            yield Difference("buffer", name, _number_of(found), _number_of(expected))


def _of_attributes(
    split: Mapping[str, object], whole: Mapping[str, object], limits: RoundingLimits
) -> Iterator[Difference]:
    for name, expected in whole.items():
        found = split.get(name, expected)
        if isinstance(expected, float) and isinstance(found, (int, float)):
            both_nan = math.isnan(found) and math.isnan(expected)
            same = both_nan or math.isclose(found, expected, rel_tol=limits.number, abs_tol=1e-9)
        else:
            same = found == expected
        if not same:
            yield Difference("attribute", name, found, expected)


def _spreads(moved: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> dict[str, tuple[float, int]]:
    """Return by name how far a rounding step moves each tensor, and how many elements it has."""
    return {
        name: (
            compare(found, expected).relative() if found.shape == expected.shape else 0.0,
            expected.numel(),
        )
        for name, expected in whole.items()
        if (found := moved.get(name, expected)) is not None
    }


def _number_of(tensor: Tensor) -> object:
    return tensor.item() if tensor.numel() == 1 else None


def _first_module(observations: Observations, found: list[Difference]) -> str | None:
    """Return where it goes wrong: what keeps other state; else the first in forward, or in backward."""
    for difference in found:
        if difference.kind in STATE:
            return _owner(difference)
    if any(difference.kind in ("loss", "output") for difference in found):
        return observations.first_forward()
    return observations.last_backward(_owner(difference) for difference in found)


def _owner(difference: Difference) -> str:
    return difference.name.rpartition(".")[0]
