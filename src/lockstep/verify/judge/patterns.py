"""Describe what a difference looks like, in a sentence: the first of seven patterns that fits, or nothing.

The rows of a batch that are others, numbers that are not finite, nothing but zeros, the value of another step, a simple
factor, copies that were not averaged or not summed, and a rank that was left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lockstep.verify.judge.verdict import RunFacts
from lockstep.verify.trace.file import Trace
from lockstep.verify.trace.items import ItemKind, TraceItem
from lockstep.verify.trace.measure import DistanceSums, compare
from lockstep.words import count, indices, listed, of_ranks

CLOSE = 1e-3
"""A pattern fits if what it leaves is at most this, relative to the norm of what was found, ..."""
TIMES_ALLOWED = 3
"""... or so many times what rounding explains, if that is more, ..."""
PART = 0.3
"""... and at most this part of the difference itself."""
LEAST_SCALE = 256
"""A power of two from which on a factor is taken for the scale of the loss."""


@dataclass(frozen=True)
class RankPart:
    """What a rank holds of a tensor that differs, and what it should; ``boxes``: as in ``Measured``."""

    rank: int
    found: Tensor
    expected: Tensor
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Case:
    """A tensor that differs.

    Attributes:
        parts: Those that differ.
        agreeing: Ranks whose part agrees.
        factor: By which what was found is a multiple of the reference; None: it is none.
        allowed: The relative distance that rounding explains, times the multiple.
    """

    item: TraceItem
    parts: tuple[RankPart, ...]
    agreeing: tuple[int, ...]
    factor: float | None
    allowed: float
    trace: Trace
    facts: RunFacts

    @cached_property
    def near(self) -> float:
        """How much a pattern may leave unexplained, relative to the norm of what it says."""
        sums = sum((compare(one.found, one.expected) for one in self.parts), DistanceSums())
        found = max(sums.expected, sums.found)
        distance = math.sqrt(sums.apart / found) if found else 0.0
        return min(max(TIMES_ALLOWED * self.allowed, CLOSE), PART * distance)

    def is_close(self, found: Tensor, expected: Tensor) -> bool:
        """Return whether two tensors of one shape are the same but for what may be left."""
        sums = compare(found, expected)
        return not sums.wrong and sums.expected > 0 and sums.apart <= self.near**2 * sums.expected

    @property
    def on_ranks(self) -> str:
        """On which ranks it differs, if it agrees on others."""
        return f" on {of_ranks([one.rank for one in self.parts])}" if self.agreeing else ""


def other_rows(case: Case) -> str:
    """Describe the rows of a batch, by their digests, that are not those of the reference."""
    if case.item.kind is not ItemKind.BATCH:
        return ""
    found, expected = (
        tensor.reshape(-1).tolist() for tensor in (case.parts[0].found, case.parts[0].expected)
    )
    if Counter(found) == Counter(expected):
        changed = sum(mine != theirs for mine, theirs in zip(found, expected, strict=True))
        return f"The rows are the same in another order: {changed} of {len(found)} have moved."
    others = [one for one in case.trace if one.kind is ItemKind.BATCH and one != case.item]
    elsewhere = {
        row
        for one in others
        if (one.name, one.path) == (case.item.name, case.item.path)
        for row in case.trace.tensor(one).reshape(-1).tolist()
    }
    foreign = [place for place, row in enumerate(found) if row not in expected]
    twice = [place for place in foreign if found[place] in elsewhere]
    repeated = len(found) - len(set(found))
    if twice:
        are = "row {} is" if len(twice) == 1 else "rows {} are"
        return f"It looks as if samples were read twice: {are.format(indices(twice))} also in another batch."
    if repeated > len(expected) - len(set(expected)):
        return f"{count(repeated, 'row')} {'is' if repeated == 1 else 'are'} in it more than once."
    return f"{len(foreign)} of {len(found)} rows are none of the reference's: it looks as if another seed was used."


def not_finite(case: Case) -> str:
    """Count NaNs and infinities."""
    wrong = {one.rank: int((~one.found.isfinite()).sum()) for one in case.parts}
    number = sum(wrong.values())
    if not number:
        return ""
    ranks = of_ranks([rank for rank, elements in wrong.items() if elements])
    return f"{count(number, 'element')} of {ranks} {'is' if number == 1 else 'are'} NaN or infinite."


def zeros(case: Case) -> str:
    """Recognise nothing but zeros."""
    if any(bool(one.found.any()) for one in case.parts):
        return ""
    causes = {
        ItemKind.UPDATE: ": it looks as if the optimizer's step was skipped{on}, or has no gradient",
        ItemKind.GRADIENT: ": it looks as if it was never computed{on}, or set to zero before the step",
    }
    return f"It is zero{case.on_ranks}{causes.get(case.item.kind, '').format(on=case.on_ranks)}."


def of_another_step(case: Case) -> str:
    """Recognise the value of the step before, or after."""
    item = case.item
    for step, which in ((item.step - 1, "before"), (item.step + 1, "after")):
        other = item._replace(step=step)
        if other not in case.trace or case.trace.shape(other) != case.trace.shape(item):
            continue
        if all(case.is_close(one.found, case.trace.held(other, one.boxes)) for one in case.parts):
            behind = "behind" if which == "before" else "ahead"
            return f"It is that of the step {which}, step {step}: it looks as if it is a step {behind}."
    return ""


def is_factor(case: Case) -> str:
    """Recognise a simple factor, and say what it is of this run."""
    factor = case.factor
    if not factor or abs(factor + 1) <= CLOSE:
        return "It looks as if its sign was turned." if factor else ""
    times = max(factor, 1 / factor)
    number = round(times)
    if number < 2 or abs(times / number - 1) > min(max(case.allowed, CLOSE), 0.02):
        return ""
    return _reason(case, number, is_more=factor > 1)


def _reason(case: Case, number: int, is_more: bool) -> str:
    facts = case.facts
    ranks, steps = facts.data_ranks, facts.accumulation_steps
    sizes = {count(ranks, "rank"): ranks, f"{steps} accumulation steps": steps}
    sizes |= {f"{size} ranks of {axis}": size for axis, size in facts.axes.items()}
    if ranks > 1 and steps > 1:
        sizes[f"{ranks} ranks and {steps} accumulation steps"] = ranks * steps
    known = listed([what for what, size in sizes.items() if size == number], "or")
    if not is_more:
        return f"It looks as if it was divided by {f'the {known} once too often' if known else number}."
    if known and case.item.kind is ItemKind.RATE:
        return f"It looks as if it was multiplied by the {known}."
    if known:
        return f"It looks as if it was summed over {known} in place of averaged."
    if number >= LEAST_SCALE and number & (number - 1) == 0:
        return f"It looks as if it was left multiplied by the scale of the loss, {number:,}."
    if ranks > number and ranks % number == 0:
        return f"It looks as if it was averaged over {ranks // number} of {ranks} ranks."
    return ""


def not_reduced(case: Case) -> str:
    """Recognise copies whose mean, or whose sum, is the reference."""
    copies = [one for one in case.parts if one.boxes == case.parts[0].boxes]
    groups = _equal_groups(case, copies)
    if case.agreeing or len(groups) < 2:
        return ""
    values = listed([of_ranks([one.rank for one in group]) for group in groups])
    expected = copies[0].expected.double()
    if case.is_close(torch.stack([one.found.double() for one in copies]).mean(0), expected):
        return f"It looks as if it was not averaged over all ranks: the mean of what {values} hold is the reference."
    # Ranks of a group hold copies, which count once in a sum.
    if case.is_close(torch.stack([group[0].found.double() for group in groups]).sum(0), expected):
        return f"It looks as if it was not summed: the sum of what {values} hold is the reference."
    return f"Ranks differ from each other: {values} have one value each."


def left_out(case: Case) -> str:
    """Recognise copies of which some are right."""
    wrong = [one.rank for one in case.parts]
    if not case.agreeing or case.parts[0].expected.shape != case.trace.shape(case.item):
        return ""
    return (
        f"The copies of {of_ranks(case.agreeing)} agree: it looks as if {of_ranks(wrong)} "
        f"{'was' if len(wrong) == 1 else 'were'} left out of what makes ranks equal."
    )


def _equal_groups(case: Case, copies: list[RankPart]) -> list[list[RankPart]]:
    """Return ranks with equal copies, but for rounding, together."""
    groups: list[list[RankPart]] = []
    for one in copies:
        for group in groups:
            if torch.equal(group[0].found, one.found) or case.is_close(one.found, group[0].found):
                group.append(one)
                break
        else:
            groups.append([one])
    return groups


PATTERNS: tuple[Callable[[Case], str], ...] = (
    not_finite,
    zeros,
    of_another_step,
    is_factor,
    not_reduced,
    left_out,
)
"""In this order; the surest first."""


def recognise(case: Case) -> str:
    """Return what a tensor that differs looks like; "" if like nothing that is known."""
    if not case.parts or any(one.found.shape != one.expected.shape for one in case.parts):
        return ""
    if not all(one.found.is_floating_point() for one in case.parts):
        return other_rows(case)
    return next((text for pattern in PATTERNS if (text := pattern(case))), "")
