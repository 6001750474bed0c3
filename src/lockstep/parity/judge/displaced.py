"""Values that are right, in a wrong place: of another step, batch or tensor, rows in another order, swapped shards.

Batches of other rows: read twice, by nobody, in another order, by another rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from lockstep.parity.judge.case import CLOSE, Case
from lockstep.parity.trace.items import ItemKind, TraceItem
from lockstep.words import count, indices, listed, of_ranks

MOST_ROWS = 2048
MOST_COLUMNS = 256
"""Of rows that are looked for among others."""
LEAST_OF_SINGLE = 4
"""Numbers that have another order by more than chance."""
MOST_OTHERS = 256
"""Other tensors that are looked at."""


def of_another_step(case: Case) -> str:
    """The value of the step before, or after."""
    item = case.item
    for step, which in ((item.step - 1, "step before"), (item.step + 1, "step after")):
        other = item._replace(step=step)
        if other in case.trace and case.all_close(lambda one, other=other: case.part_of(other, one)):  # type: ignore[misc]
            return f"It is that of the {which}, step {step}: it looks as if {_stale(item.kind, step < item.step)}."
    return ""


def of_another_batch(case: Case) -> str:
    """The value of another data rank, or micro-batch; or their mean."""
    item = case.item
    if not item.kind.is_of_micro_batch and item.kind is not ItemKind.BUFFER:
        return ""
    others = [one for one in _other_micro_batches(case) if one != item]
    for other in others:
        if case.all_close(lambda one, other=other: case.part_of(other, one)):  # type: ignore[misc]
            return f"It is that of {_whose(other, item)}."
    if others and item.kind is ItemKind.LOSS:
        of_data_ranks = [one for one in others if one.micro_batch == item.micro_batch]
        mean = torch.stack([case.trace.tensor(one).double() for one in [item, *of_data_ranks]]).mean(0)
        if of_data_ranks and case.all_close(lambda one: mean):
            return f"It is the mean of those of the {len(of_data_ranks) + 1} data ranks."
    return ""


def of_another_tensor(case: Case) -> str:
    """The value that another tensor of this step has; a clipped gradient as it was before."""
    item = case.item
    if item.kind is ItemKind.CLIPPED:
        before = item._replace(kind=ItemKind.GRADIENT)
        if case.all_close(lambda one: case.part_of(before, one)):
            return "It looks as if it was not clipped: it is the gradient from before."
    for other in others_like(case):
        if case.all_close(lambda one, other=other: case.part_of(other, one)):  # type: ignore[misc]
            return f"It is the {other.kind.value} of `{other.name}`: it looks as if the two were swapped."
    return ""


def others_like(case: Case) -> Iterator[TraceItem]:
    """Items of the same kind, step and shape under another name."""
    item, shape = case.item, case.trace.shape(case.item)
    seen = 0
    for other in case.trace:
        is_like = other.step == item.step and other.kind is item.kind and other.name != item.name
        if is_like and other._replace(name=item.name) == item and case.trace.shape(other) == shape:
            # A large model has thousands alike, and each is a read of the trace.
            seen += 1
            if seen > MOST_OTHERS:
                return
            yield other


def swapped_shards(case: Case) -> str:
    """Ranks that hold what other ranks should."""
    owners: dict[int, int] = {}
    for one in case.parts:
        for other in case.parts:
            if other.boxes != one.boxes and case.is_close(one.found, other.expected):
                owners[one.rank] = other.rank
                break
    if not owners or len(owners) < len(case.parts):
        return ""
    swaps = [f"rank {mine} holds what rank {theirs} should" for mine, theirs in sorted(owners.items())]
    return f"It looks as if shards were swapped: {listed(swaps[:4])}."


def other_order(case: Case) -> str:
    """Rows, or slices along another dimension, in another order."""
    for dim in range(max((one.found.ndim for one in case.parts), default=0)):
        orders = [_order_of_slices(case, one.found, one.expected, dim) for one in case.parts]
        moved = [order for order in orders if order is not None]
        if moved and len(moved) == len(orders):
            return f"It looks as if {_moved(moved[0], dim)}."
    return ""


def _order_of_slices(case: Case, found: Tensor, expected: Tensor, dim: int) -> list[int] | None:
    """Which slice of what is expected each slice of what was found is; None if they are no others in another order."""
    if found.shape != expected.shape or dim >= found.ndim or not 2 <= found.shape[dim] <= MOST_ROWS:
        return None
    mine, theirs = _flat_rows(found, dim), _flat_rows(expected, dim)
    near = case.near
    # Single numbers are near others by chance: it takes several, and they must be closer.
    if mine.shape[1] == 1:
        if len(mine) < LEAST_OF_SINGLE:
            return None
        near = min(near, CLOSE)
    # Not by products, whose rounding would hide which of two near rows is nearer.
    nearest = torch.cdist(mine, theirs, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
    order: list[int] = nearest.tolist()
    if sorted(order) != list(range(len(order))) or order == list(range(len(order))):
        return None
    return (
        order if case.is_close(found.double(), expected.double().index_select(dim, nearest), near) else None
    )


def _flat_rows(tensor: Tensor, dim: int) -> Tensor:
    rows = tensor.double().movedim(dim, 0).reshape(tensor.shape[dim], -1)
    # Evenly spaced columns are enough to tell rows apart; what comes of it is checked on all of them.
    if rows.shape[1] > MOST_COLUMNS:
        rows = rows[:, torch.linspace(0, rows.shape[1] - 1, MOST_COLUMNS).long()]
    return rows.contiguous()


def _moved(order: list[int], dim: int) -> str:
    number = len(order)
    along = "rows" if dim == 0 else f"slices along dimension {dim}"
    shift = (order[0]) % number
    if all(place == (index + shift) % number for index, place in enumerate(order)):
        by = shift if shift <= number // 2 else shift - number
        return f"its {along} were moved by {-by}"
    changed = sum(place != index for index, place in enumerate(order))
    return f"{count(changed, 'row') if dim == 0 else f'{changed} {along}'} of {number} are in another order"


def _other_micro_batches(case: Case) -> list[TraceItem]:
    """The item in other micro-batches of this step, on all data ranks."""
    item = case.item
    return [
        one
        for one in case.trace
        if one.step == item.step
        and one.kind is item.kind
        and one._replace(micro_batch=item.micro_batch, data_rank=item.data_rank) == item
    ]


def _whose(other: TraceItem, item: TraceItem) -> str:
    differences = [f"data rank {other.data_rank}"] if other.data_rank != item.data_rank else []
    differences += [f"micro-batch {other.micro_batch}"] if other.micro_batch != item.micro_batch else []
    return ", ".join(differences)


def _stale(kind: ItemKind, is_before: bool) -> str:
    if kind is ItemKind.RATE:
        return "the scheduler is " + ("a step behind" if is_before else "a step ahead")
    if not is_before:
        return "it is a step ahead"
    if kind in (ItemKind.OUTPUT, ItemKind.LOSS):
        return "weights or a batch from before the last step were used"
    if kind is ItemKind.BATCH:
        return "a batch was read twice"
    return "it was not computed anew"


BatchRow = tuple[int, ...]


def of_rows(case: Case) -> str:
    """What the rows of a batch are, by their digests, if not those of the reference.

    A row is a digest, or several numbers; rows follow one another along the first dimension.
    """
    if case.item.kind is not ItemKind.BATCH or not case.parts:
        return ""
    one = case.parts[0]
    found, expected = rows_of(one.found), rows_of(one.expected)
    if Counter(found) == Counter(expected):
        changed = sum(mine != theirs for mine, theirs in zip(found, expected, strict=True))
        return f"The rows are the same in another order: {changed} of {len(found)} have moved."
    repeated = sum(number - 1 for number in Counter(found).values()) - sum(
        number - 1 for number in Counter(expected).values()
    )
    owner = _owner(case, found)
    if owner is not None:
        return f"The rows are those of {_named(owner, case.item)}: it looks as if a batch was read twice."
    elsewhere = _elsewhere(case)
    foreign = [index for index, row in enumerate(found) if row not in set(expected)]
    lost = [index for index, row in enumerate(expected) if row not in set(found)]
    taken = [index for index in foreign if found[index] in elsewhere]
    clauses = []
    if taken:
        whose = sorted({elsewhere[found[index]].data_rank for index in taken} - {-1})
        of = f" of data {of_ranks(whose)}" if whose else ""
        clauses.append(
            f"{_rows_text(taken)} {_are(taken)} also in another batch{of} of the reference: it looks as if "
            f"{'a sample was' if len(taken) == 1 else 'samples were'} read twice"
        )
    if repeated > 0:
        clauses.append(f"{count(repeated, 'row')} {'is' if repeated == 1 else 'are'} in it more than once")
    if lost:
        clauses.append(f"{_rows_text(lost)} of the reference {_are(lost)} missing")
    if foreign and not taken and len(foreign) == len(found):
        return "None of its rows is one of the reference's: it looks as if another seed, or an unseeded one, was used."
    return f"{'; '.join(clauses)[:1].upper()}{'; '.join(clauses)[1:]}." if clauses else ""


def rows_of(digests: Tensor) -> list[BatchRow]:
    """[rows, ...] of digests as one tuple a row; one number is one row."""
    table = digests.reshape(digests.shape[0], -1) if digests.ndim else digests.reshape(1, 1)
    return [tuple(row) for row in table.tolist()]


def _elsewhere(case: Case) -> dict[BatchRow, TraceItem]:
    """The rows of all other batches of the trace, with where they are first read."""
    places: dict[BatchRow, TraceItem] = {}
    for item in case.trace:
        if (
            item.kind is ItemKind.BATCH
            and item != case.item
            and item.path == case.item.path
            and item.name == case.item.name
        ):
            for row in rows_of(case.trace.tensor(item)):
                places.setdefault(row, item)
    return places


def _owner(case: Case, found: list[BatchRow]) -> TraceItem | None:
    """The other batch of the trace that has the same rows."""
    for item in case.trace:
        is_like = item.kind is ItemKind.BATCH and item != case.item and item.path == case.item.path
        if is_like and item.name == case.item.name and rows_of(case.trace.tensor(item)) == found:
            return item
    return None


def _named(other: TraceItem, item: TraceItem) -> str:
    differences = [f"step {other.step}"] if other.step != item.step else []
    differences += [f"data rank {other.data_rank}"] if other.data_rank != item.data_rank else []
    differences += [f"micro-batch {other.micro_batch}"] if other.micro_batch != item.micro_batch else []
    return ", ".join(differences)


def _rows_text(places: list[int]) -> str:
    return f"{'row' if len(places) == 1 else 'rows'} {indices(places)}"


def _are(places: list[int]) -> str:
    return "is" if len(places) == 1 else "are"
