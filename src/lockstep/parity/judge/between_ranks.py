"""Copies of one tensor that differ from rank to rank: not averaged, not summed, averaged in groups, left out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.parity.judge.case import Case, RankPart
from lockstep.parity.judge.words import count, listed, of_ranks
from lockstep.parity.trace.items import ItemKind


def not_averaged(case: Case) -> str:
    """Ranks hold different values whose mean, or whose sum, is the reference."""
    copies = _copies(case)
    if case.agreeing or len(copies) < 2:
        return ""
    groups = equal_groups(case, copies)
    if len(groups) < 2:
        return ""
    values = torch.stack([one.found.double() for one in copies])
    expected = copies[0].expected.double()
    data_ranks = {case.facts.data_rank(one.rank) for one in copies}
    is_mean, is_sum = case.is_close(values.mean(0), expected), case.is_close(values.sum(0), expected)
    of_groups = torch.stack([group[0].found.double() for group in groups]).sum(0)
    if case.item.kind is ItemKind.NORM and case.is_close((values**2).sum(0).sqrt(), expected):
        return f"It looks as if each rank has the norm of its own shard: local norms of {count(len(copies), 'rank')}."
    if is_mean and (len(groups) == len(copies) or len(groups) == len(data_ranks)):
        return (
            f"It looks as if it was not averaged: each of the {len(groups)} ranks holds that of its own batch, and "
            "their mean is the reference."
            if len(groups) == len(copies)
            else f"It looks as if it was not averaged over the {len(groups)} data ranks: their mean is the reference."
        )
    if is_mean:
        size = len(groups[0])
        return (
            f"It looks as if it was averaged over {size} of {len(copies)} ranks: {_listed(groups)} have one value "
            "each, whose mean is the reference."
        )
    if is_sum or case.is_close(of_groups, expected):
        return (
            f"It looks as if it was not summed: each of the {len(groups)} "
            f"{'ranks' if len(groups) == len(copies) else 'groups of ranks'} holds its part of a sum, which is the "
            "reference."
        )
    return ""


def differ(case: Case) -> str:
    """Some ranks are right, or ranks differ from each other in no way that has a name."""
    copies = _copies(case)
    wrong = tuple(one.rank for one in copies)
    whole = case.parts[0].boxes if case.parts else ()
    if case.agreeing and copies and len(copies) == len(case.parts) and not _is_part(case, whole):
        return (
            f"The copies of {of_ranks(case.agreeing)} agree: it looks as if {of_ranks(wrong)} "
            f"{'was' if len(wrong) == 1 else 'were'} left out of what makes ranks equal."
        )
    groups = equal_groups(case, copies) if len(copies) > 1 else []
    if len(groups) < 2:
        return ""
    if len(groups) == len(copies):
        return f"The copies of {of_ranks(wrong)} differ from each other."
    return f"Ranks differ from each other: {_listed(groups)} have one value each."


def equal_groups(case: Case, copies: Sequence[RankPart]) -> list[list[RankPart]]:
    """Ranks with equal copies, but for rounding."""
    groups: list[list[RankPart]] = []
    for one in copies:
        for group in groups:
            first = group[0].found
            if torch.equal(first, one.found) or case.is_close(one.found, first, min(case.allowed, case.near)):
                group.append(one)
                break
        else:
            groups.append([one])
    return groups


def _copies(case: Case) -> list[RankPart]:
    """The parts with the same boxes as the first."""
    return [one for one in case.parts if one.boxes == case.parts[0].boxes] if case.parts else []


def _is_part(case: Case, boxes: tuple[object, ...]) -> bool:
    return bool(boxes) and case.parts[0].expected.numel() < _elements(case.trace.shape(case.item))


def _elements(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _listed(groups: Sequence[Sequence[RankPart]]) -> str:
    return listed([of_ranks([one.rank for one in group]) for group in groups])
