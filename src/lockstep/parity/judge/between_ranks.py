"""Copies of one tensor that differ from rank to rank: not averaged, not summed, averaged in groups, left out.

Of gradients it is found out whose batches they have: they may be those of some ranks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.parity.judge.case import Case, RankPart
from lockstep.parity.trace.items import ItemKind
from lockstep.parity.trace.sketch import row_sketch
from lockstep.words import count, indices, listed, of_ranks


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
    # Ranks of a group hold copies, which count once in a sum.
    of_groups = torch.stack([group[0].found.double() for group in groups]).sum(0)
    # Squares of the norms of shards add up to that of the whole.
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


class Terms(NamedTuple):
    """What a rank's gradient is made of.

    Attributes:
        data_ranks: Whose batches it has.
        is_mean: It is the mean of their gradients; if not, others have counted as zeros.
    """

    data_ranks: tuple[int, ...]
    is_mean: bool


def of_some_ranks(case: Case) -> str:
    """A gradient that is that of the batches of some ranks; known by sketches of what each rank adds."""
    if case.item.kind is not ItemKind.GRADIENT or case.facts.data_ranks < 2:
        return ""
    items = [case.item.of_rank(rank) for rank in range(case.facts.data_ranks)]
    if any(item not in case.trace for item in items):
        return ""
    sketches = [case.trace.tensor(item).double() for item in items]
    terms = {one.rank: _terms(case, one, sketches) for one in case.parts}
    known = {rank: one for rank, one in terms.items() if one is not None}
    return _not_averaged_text(case, known) if len(known) == len(terms) else ""


def _terms(case: Case, part: RankPart, sketches: Sequence[Tensor]) -> Terms | None:
    rows = _rows_of_part(part, len(sketches[0]))
    if rows is None or not bool(part.found.isfinite().all()):
        return None
    found = row_sketch(part.found).double().reshape(-1)
    of_ranks = torch.stack([one[rows].reshape(-1) for one in sketches])
    count = len(sketches)
    if len(found) > count:
        # Ranks whose batches it has get equal weights, others none. Sketches may depend on each other: gelsd.
        weights = torch.linalg.lstsq(of_ranks.T, found[:, None], driver="gelsd").solution[:, 0].abs()
        tried = [tuple((weights > 0.5 * weights.max()).nonzero().reshape(-1).tolist())]
    else:
        # Any numbers are then some sum of them.
        tried = [(rank,) for rank in range(count)]
    for ranks in tried:
        total = of_ranks[list(ranks)].sum(0)
        # Their mean; or their sum by the number of all ranks, where the others have counted as zeros.
        for divisor in {len(ranks), count} if len(ranks) < count else ():
            if case.is_close(found, total / divisor):
                return Terms(ranks, divisor == len(ranks))
    return None


def _rows_of_part(part: RankPart, rows: int) -> slice | None:
    """Which rows of the whole a rank has; None: none that are whole."""
    if not part.boxes:
        return slice(0, rows)
    if len(part.boxes) > 1:
        return None
    [(offsets, shape)] = part.boxes
    is_whole = not any(offsets[1:]) and shape == tuple(part.found.shape)
    return slice(offsets[0], offsets[0] + shape[0]) if offsets and is_whole else None


def _not_averaged_text(case: Case, terms: dict[int, Terms]) -> str:
    where = f" on {of_ranks(list(terms))}" if case.agreeing else ""
    different = set(terms.values())
    if all(one.is_mean for one in different):
        if all(one.data_ranks == (case.facts.data_rank(rank),) for rank, one in terms.items()):
            each = "the rank holds that of its" if len(terms) == 1 else "each rank holds that of its"
            return f"It looks as if it was not averaged{where}: {each} own batches alone."
        if len(different) == 1:
            [(ranks, _)] = different
            if len(ranks) == 1:
                return f"It is that of {_whose(case, ranks)} batches alone{where}."
            return (
                f"It looks as if it was averaged over {len(ranks)} of {case.facts.data_ranks} ranks{where}: it is the "
                f"mean of those of {_named(case, ranks)}."
            )
        sizes = {len(one.data_ranks) for one in different}
        if len(sizes) == 1 and sizes != {1}:
            groups = listed([_named(case, one.data_ranks) for one in sorted(different)])
            return (
                f"It looks as if it was averaged over {sizes.pop()} of {case.facts.data_ranks} ranks: it is the mean "
                f"of those of {groups}."
            )
        return ""
    if len(different) == 1:
        [(ranks, _)] = different
        absent = tuple(rank for rank in range(case.facts.data_ranks) if rank not in ranks)
        return f"It looks as if {_named(case, absent)} added nothing to it{where}."
    return ""


def _named(case: Case, data_ranks: Sequence[int]) -> str:
    return f"data {of_ranks(data_ranks)}" if case.facts.axes else of_ranks(data_ranks)


def _whose(case: Case, data_ranks: Sequence[int]) -> str:
    return f"{'data ' if case.facts.axes else ''}rank {indices(data_ranks)}'s"
