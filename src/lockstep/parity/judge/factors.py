"""Tensors that are a simple factor times what they should be, and where such a factor comes from."""

from __future__ import annotations

import math
from fractions import Fraction

from lockstep.parity.judge.case import Case
from lockstep.parity.judge.facts import RunFacts
from lockstep.parity.trace.items import ItemKind, TraceItem
from lockstep.words import count, listed, seven_digits

MOST = 4096
"""The largest integer that is recognised as a factor, and the inverse of the smallest."""
MOST_OF_FRACTION = 8
"""Of numerators and denominators that are recognised: 3/2."""
LEAST_SCALE = 256
"""A power of two from which on it is taken for the scale of the loss."""


def factor_of(case: Case) -> float | None:
    """The number that everything found is a multiple by, if that is so."""
    sums = case.sums
    if sums.wrong or not sums.expected or not sums.found:
        return None
    factor = sums.product / sums.expected
    # Of the squares of what was found, what the best multiple leaves; by rounding it may be below 0.
    left = max(sums.found - sums.product**2 / sums.expected, 0.0)
    return factor if factor and left <= case.near**2 * sums.found else None


def simple(factor: float, close: float) -> Fraction | None:
    """The integer, its inverse or the small fraction that a factor is."""
    if not math.isfinite(factor) or not factor:
        return None
    size = abs(factor)
    candidates = [Fraction(round(size)) if size >= 1 else Fraction(1, max(round(1 / size), 1))]
    candidates.append(Fraction(size).limit_denominator(MOST_OF_FRACTION))
    for one in candidates:
        is_small = one.numerator <= MOST_OF_FRACTION or one.denominator == 1
        if one and is_small and one <= MOST and one >= Fraction(1, MOST) and abs(size / one - 1) <= close:
            return one if factor > 0 else -one
    power = round(math.log2(size))
    if power >= 0 and abs(size / 2**power - 1) <= close:
        return Fraction(2**power) * (1 if factor > 0 else -1)
    return None


def is_factor(case: Case) -> str:
    """All parts are a factor times the reference: which, and what it is of this run."""
    factor = factor_of(case)
    if factor is None:
        return ""
    close = min(max(case.allowed, 1e-3), 0.02)
    # A norm to which n copies were added is the root of n times too large: its square tells n.
    if case.item.kind is ItemKind.NORM:
        return _of_norm(simple(factor**2, 2 * close), case.facts)
    number = simple(factor, close)
    if number is None or number == 1:
        return ""
    if number == -1:
        return "It looks as if its sign was turned."
    if number < 0:
        return f"It looks as if it was multiplied by {seven_digits(float(number))}."
    if case.item.kind is ItemKind.RATE:
        return _of_rate(number, case.facts)
    reasons = _reasons(number, case.item, case.facts)
    return f"It looks as if it was {listed(reasons, 'or')}." if reasons else ""


def _reasons(number: Fraction, item: TraceItem, facts: RunFacts) -> list[str]:
    """What a factor may come from."""
    ranks, steps = facts.data_ranks, facts.accumulation_steps
    found: list[str] = []
    if number.denominator == 1:
        times = number.numerator
        if times == ranks:
            found.append(f"summed over {count(ranks, 'rank')} in place of averaged")
        if times == steps:
            found.append(
                f"multiplied by the {steps} accumulation steps (micro-batches summed in place of averaged)"
            )
        if times == ranks * steps and ranks > 1 and steps > 1:
            found.append(f"summed over {ranks} ranks and {steps} accumulation steps in place of averaged")
        found += [
            f"counted once for each of the {size} ranks of {axis}"
            for axis, size in facts.axes.items()
            if size == times
        ]
        if not found and times >= LEAST_SCALE and times & (times - 1) == 0:
            found.append(f"left multiplied by the scale of the loss, {times:,}")
        if not found and ranks > times and ranks % times == 0:
            found.append(f"averaged over {ranks // times} of {ranks} ranks")
        if not found and facts.nproc == times:
            found.append(f"summed over all {times} ranks")
        return found or ([f"added {times} times"] if times <= 4 else [])
    if number.numerator == 1:
        times = number.denominator
        if times == ranks:
            found.append(f"divided by the {count(ranks, 'rank')} once too often")
        if times == steps:
            found.append(f"divided by the {steps} accumulation steps once too often")
        if times == ranks * steps and ranks > 1 and steps > 1:
            found.append(f"divided by {ranks} ranks and {steps} accumulation steps once too often")
        found += [
            f"divided by the {size} ranks of {axis}, or only one of them counted"
            for axis, size in facts.axes.items()
            if size == times
        ]
        if not found and ranks > times and ranks % times == 0:
            found.append(f"averaged over {ranks} ranks after a sum over {ranks // times} of them")
        if not found and facts.nproc == times:
            found.append(f"divided by all {times} ranks")
        return found or [f"divided by {times}"]
    return (
        [f"multiplied by {number.numerator}/{number.denominator}"] if item.kind is not ItemKind.UPDATE else []
    )


def _of_norm(square: Fraction | None, facts: RunFacts) -> str:
    """A norm whose square is a multiple of what it should be."""
    if square is None or square <= 0 or square == 1:
        return ""
    sizes = {facts.nproc: "ranks"} | {facts.data_ranks: "data ranks"}
    sizes |= {size: f"ranks of {axis}" for axis, size in facts.axes.items() if size not in sizes}
    for size, whose in sizes.items():
        if size < 2:
            continue
        if square == size:
            return (
                f"It looks as if the squares of gradients of which {size} {whose} hold copies were added up "
                f"{size} times: the square root of {size}."
            )
        if square == Fraction(1, size):
            return f"It looks as if the norm is of one shard of {size}, not of all: 1 by the square root of {size}."
        if square == size**2:
            return f"It looks as if the norm, or what it is of, was summed over {size} {whose}."
        if square == Fraction(1, size**2):
            return (
                f"It looks as if the norm is of gradients that were divided by {size} {whose} once too often."
            )
    steps = facts.accumulation_steps
    if steps > 1 and square == steps**2:
        return f"It looks as if the norm is of gradients multiplied by the {steps} accumulation steps."
    return ""


def _of_rate(number: Fraction, facts: RunFacts) -> str:
    if number.denominator == 1 and number.numerator in (facts.nproc, facts.data_ranks):
        return f"It looks as if it was scaled by the {number.numerator} ranks."
    if number.numerator == 1 and number.denominator in (facts.nproc, facts.data_ranks):
        return f"It looks as if it was divided by the {number.denominator} ranks."
    if number.denominator == 1 and number.numerator == facts.accumulation_steps:
        return f"It looks as if it was multiplied by the {number.numerator} accumulation steps."
    return ""
