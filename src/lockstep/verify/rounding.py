"""What rounding explains: how far numbers move when weights and inputs are off by one rounding step.

The proof of the first batch and ``lockstep check`` both run the whole model once more like that: on the processor at
hand, whose kernels round in their own way, and in the type of the run. How far a tensor moves is its spread. What is
compared may be a multiple of it away. One run is one sample, so no spread is taken for less than what is usual of its
kind, and tensors of few elements, whose spread can be small by chance, get a larger multiple.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from lockstep.parallel.determinism import numbers

MULTIPLE = 10
"""Times the spread: another order of a sum of n terms moves it by up to the root of log n more than one rounding step
does, and a rank's kernels for smaller shapes add up in another order than those for the whole batch."""
MULTIPLE_OF_HALF = 4
"""Where products are rounded to 16 bits: a run in that precision is such a run as the candidate."""
UNSTEADY = 50
"""Times the least spread: so far a tensor is moved by few elements (attention near a switch), and one run says less
about the next. Then the larger multiple holds in 16 bits, too."""
LEAST_EPS, LEAST_EPS_OF_HALF = 2, 0.5
"""Times the precision of the type, at least. A mean of many numbers of 16 bits has less error than one of them."""
FEW = 9
"""n elements have the multiple 1 + FEW/n times: of one element a tenth of all samples is below a tenth of the usual."""
MANY = 64
"""Elements from which on the spread is known well enough for the next two."""
LARGE = 0.45
"""More than this is allowed of no tensor of many elements, ..."""
TIMES_LARGE = 2
"""... but this many times its spread: half or twice a tensor, or none of it, must be seen."""
SMALLEST = 1e-2
"""Times the usual size of gradients: a smaller gradient counts as being of this size. It may be zero in mathematics
(the bias of attention's keys, a bias before a normalisation), and is nothing but rounding then."""
FLIPPED = 8
"""Elements that 16 bits put on the other side of a kink (a ReLU, a maximum) in one run and not in the other. Each takes
or gives a gradient the share of one unit at one position. So few are there that one run need not show one."""
PATTERN = 65537
"""Elements after which up and down repeat: a prime, so that rows of a tensor differ."""


@torch.no_grad()
def disturbed(tensor: Tensor, half: torch.dtype | None = None) -> Tensor:
    """Move each float element, of a tensor of any shape, to the next larger or smaller number, as if by chance.

    With ``half``, a type of 16 bits, an element becomes one of the two numbers of that type beside it. Exact zeros
    (padding, LoRA's second factor) have a meaning and stay, and so does what has no finite neighbour. Nested and sparse
    tensors and types of 8 bits, for which torch has no next number, are returned as they are.
    """
    if not tensor.is_floating_point() or tensor.is_nested or tensor.layout is not torch.strided:
        return tensor
    if not tensor.numel() or tensor.itemsize < 2:
        return tensor
    pattern = numbers((min(PATTERN, tensor.numel()),)) < 1
    up = (
        pattern.repeat(-(-tensor.numel() // len(pattern)))[: tensor.numel()]
        .view(tensor.shape)
        .to(tensor.device)
    )
    rounded = tensor if half is None else tensor.to(half)
    if half is not None:
        error = tensor - rounded.to(tensor.dtype)
        stays, up = up | (error == 0), error > 0
    else:
        stays = tensor == 0
    to = torch.full_like(rounded, torch.inf)
    moved = torch.nextafter(rounded, torch.where(up, to, -to))
    return torch.where(stays | ~moved.isfinite(), rounded, moved)


@dataclass(frozen=True)
class Rounding:
    """What is allowed where numbers are rounded to one type: ``multiple`` of a spread, which is ``least`` at least."""

    multiple: float
    least: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> Rounding:
        """Return that of a type of 16, 32 or 64 bits."""
        info = torch.finfo(dtype)
        if info.bits == 16:
            return cls(MULTIPLE_OF_HALF, LEAST_EPS_OF_HALF * info.eps)
        return cls(MULTIPLE, LEAST_EPS * info.eps)

    def allowed(self, spread: float, elements: float) -> float:
        """Return how far a tensor of so many elements may be off, relative to its size."""
        multiple = MULTIPLE if spread > UNSTEADY * self.least else self.multiple
        return multiple * (1 + FEW / max(elements, 1)) * spread


def flipped(positions: int, units: int) -> float:
    """Return how far elements at kinks may move a gradient of so many units, relative to its size, in 16 bits."""
    return min(LARGE, math.sqrt(FLIPPED / max(positions * units, 1)))


def bounded(allowed: float, spread: float, elements: int) -> float:
    """Return ``allowed``, or the most that is allowed of a tensor of many elements."""
    return min(allowed, max(LARGE, TIMES_LARGE * spread)) if elements >= MANY else allowed


def smallest(sizes: Iterable[float]) -> float:
    """Return the size that tensors of one kind count as having at least; ``sizes``: root mean squares of all."""
    return SMALLEST * median(list(sizes) or [0.0])
