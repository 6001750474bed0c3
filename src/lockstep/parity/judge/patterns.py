"""What a difference looks like, in a sentence: the first of a list of known shapes that fits; nothing if none does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lockstep.parity.judge.between_ranks import differ, not_averaged, of_some_ranks
from lockstep.parity.judge.case import Case, flat
from lockstep.parity.judge.displaced import (
    of_another_batch,
    of_another_step,
    of_another_tensor,
    of_rows,
    other_order,
    others_like,
    swapped_shards,
)
from lockstep.parity.judge.factors import is_factor
from lockstep.parity.trace.items import ItemKind, TraceItem
from lockstep.words import count, indices, of_ranks, two_digits

ALIGNED = 0.99
"""Cosine of what is left and a term from which on the one is taken for the other."""
LEAST_ELEMENTS = 8
"""That have a direction which is none by chance."""
LEAST_OF_ROUNDED = 16
ALMOST_ALL = 0.999
"""Of a difference that is in some rows, before they are named."""
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def not_finite(case: Case) -> str:
    """NaNs and infinities."""
    wrong = [(one, int((~one.found.isfinite()).sum())) for one in case.parts if one.found.is_floating_point()]
    number = sum(count for _, count in wrong)
    if not number:
        return ""
    ranks = [one.rank for one, count in wrong if count]
    what = count(number, "element")
    return f"{what} of {of_ranks(ranks)} {'is' if number == 1 else 'are'} NaN or infinite."


def zeros(case: Case) -> str:
    """Nothing but zeros."""
    if any(bool(one.found.any()) for one in case.parts):
        return ""
    ranks = case.ranks
    alone = f" on {of_ranks(ranks)}" if case.agreeing else ""
    if case.item.kind is ItemKind.UPDATE:
        return (
            f"It is zero{alone}: it looks as if the optimizer's step was skipped{alone}, or has no gradient."
        )
    if case.item.kind in (ItemKind.GRADIENT, ItemKind.CLIPPED):
        return (
            f"It is zero{alone}: it looks as if it was never computed{alone}, or set to zero before the step."
        )
    return f"It is zero{alone}."


def missing_or_doubled_term(case: Case) -> str:
    """What is left is another tensor of the step: its weight, the gradient of the step before, a tied weight's."""
    left = flat([one.found.double() - one.expected.double() for one in case.parts])
    if len(left) < LEAST_ELEMENTS or not bool(left.isfinite().all()):
        return ""
    for other, words in _terms(case):
        parts = [case.part_of(other, one) for one in case.parts]
        if any(one is None or not one.is_floating_point() for one in parts):
            continue
        term = flat([one for one in parts if one is not None])
        norms = float(term.norm() * left.norm())
        cosine = float(term.dot(left)) / norms if norms else 0.0
        if abs(cosine) < ALIGNED:
            continue
        factor = float(term.dot(left) / term.dot(term))
        is_whole = math.isclose(abs(factor), 1, rel_tol=2e-2)
        # Weight decay has a factor of its own; another tensor is added or left out as a whole.
        if is_whole or (other.kind is ItemKind.WEIGHT and other.name == case.item.name):
            times = "" if is_whole else f"{two_digits(abs(factor))} times "
            return f"It looks as if {times}{words} was {'added' if factor > 0 else 'left out'}."
    return ""


def _terms(case: Case) -> Iterator[tuple[TraceItem, str]]:
    """Tensors that may be added or missing."""
    item = case.item
    if item.kind in (ItemKind.GRADIENT, ItemKind.CLIPPED):
        # The second one is what clipping has left of it.
        for kind in (ItemKind.GRADIENT, ItemKind.CLIPPED):
            yield (
                item._replace(step=item.step - 1, kind=kind),
                "the gradient of the step before (not set to zero in between)",
            )
    if item.kind in (ItemKind.GRADIENT, ItemKind.CLIPPED, ItemKind.UPDATE):
        yield item._replace(kind=ItemKind.WEIGHT, step=0), "the weight itself (weight decay)"
    for other in others_like(case):
        yield other, f"the {other.kind.value} of `{other.name}`"


def rounded(case: Case) -> str:
    """The rounding of another dtype."""
    found, expected = (flat([getattr(one, name) for one in case.parts]) for name in ("found", "expected"))
    if len(found) < LEAST_OF_ROUNDED or not bool(found.isfinite().all()):
        return ""
    distance = float((found - expected).norm() / expected.norm()) if bool(expected.any()) else math.inf
    for name, dtype in HALVES.items():
        # Rounding to nearest moves an element by at most eps / 2 of its size: this is something else.
        if name == case.facts.dtype or distance > 2 * torch.finfo(dtype).eps:
            continue
        if torch.equal(_in(found, dtype), found) and not torch.equal(_in(expected, dtype), expected):
            return f"All its numbers are {name} numbers: it looks as if it was rounded to {name}."
    if case.facts.dtype != "fp32":
        return ""
    changed = float((found != expected).double().mean())
    for name, dtype in HALVES.items():
        eps = torch.finfo(dtype).eps
        # What is wrong is off in some places; rounding is off in most, and by little.
        if 0.1 * eps <= distance <= eps and changed > 0.8 and _is_even(found - expected, expected, eps):
            return (
                f"The difference is as large as that of sums in {name}{' or TF32' if name == 'fp16' else ''}."
            )
    return ""


def _in(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    return numbers.to(dtype).double()


def _is_even(apart: Tensor, expected: Tensor, eps: float) -> bool:
    """Whether a difference is spread over all elements, and to both sides."""
    usual = expected.square().mean().sqrt()
    return bool(apart.abs().max() <= 8 * eps * usual.clamp(min=expected.abs().max() / 4)) and bool(
        (apart * expected.sign()).mean().abs() <= 0.25 * apart.square().mean().sqrt()
    )


def some_rows(case: Case) -> str:
    """Only some of the rows differ."""
    # Row numbers mean the same on all ranks only if these hold the same rows.
    if len(case.parts) != 1 and len({one.boxes for one in case.parts}) != 1:
        return ""
    one = case.parts[0]
    if one.found.ndim == 0 or one.found.shape[0] < 2 or not one.found.is_floating_point():
        return ""
    apart = (one.found.double() - one.expected.double()).reshape(len(one.found), -1).norm(dim=1)
    usual = one.expected.double().norm() / math.sqrt(len(one.found))
    wrong = (apart > max(case.allowed, 1e-12) * usual).nonzero().reshape(-1).tolist()
    if not wrong or 2 * len(wrong) > len(one.found) or apart[wrong].norm() < ALMOST_ALL * apart.norm():
        return ""
    rows = f"{'row' if len(wrong) == 1 else 'rows'} {indices(wrong)}"
    return f"Only {rows} of {len(one.found)} {'differs' if len(wrong) == 1 else 'differ'}."


SHAPES: tuple[Callable[[Case], str], ...] = (
    of_rows,
    not_finite,
    zeros,
    of_another_step,
    is_factor,
    not_averaged,
    of_some_ranks,
    of_another_batch,
    of_another_tensor,
    swapped_shards,
    other_order,
    missing_or_doubled_term,
    rounded,
    differ,
    some_rows,
)
"""In this order; the surest first."""


def recognise(case: Case) -> str:
    """What a tensor that differs looks like; "" if like nothing that is known."""
    if not case.parts or any(one.found.shape != one.expected.shape for one in case.parts):
        return ""
    floats = all(one.found.is_floating_point() for one in case.parts)
    for shape in SHAPES if floats else (of_rows,):
        description = shape(case)
        if description:
            return description
    return ""
