"""Batches of other rows: read twice, by nobody, in another order, by another rank."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from lockstep.parity.judge.case import Case
from lockstep.parity.judge.words import count, indices, of_ranks
from lockstep.parity.trace.items import ItemKind, TraceItem

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
    said = []
    if taken:
        whose = sorted({elsewhere[found[index]].data_rank for index in taken} - {-1})
        of = f" of data {of_ranks(whose)}" if whose else ""
        said.append(
            f"{_rows_text(taken)} {_are(taken)} also in another batch{of} of the reference: it looks as if "
            f"{'a sample was' if len(taken) == 1 else 'samples were'} read twice"
        )
    if repeated > 0:
        said.append(f"{count(repeated, 'row')} {'is' if repeated == 1 else 'are'} in it more than once")
    if lost:
        said.append(f"{_rows_text(lost)} of the reference {_are(lost)} missing")
    if foreign and not taken and len(foreign) == len(found):
        return "None of its rows is one of the reference's: it looks as if another seed, or an unseeded one, was used."
    return f"{'; '.join(said)[:1].upper()}{'; '.join(said)[1:]}." if said else ""


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
    said = [f"step {other.step}"] if other.step != item.step else []
    said += [f"data rank {other.data_rank}"] if other.data_rank != item.data_rank else []
    said += [f"micro-batch {other.micro_batch}"] if other.micro_batch != item.micro_batch else []
    return ", ".join(said)


def _rows_text(places: list[int]) -> str:
    return f"{'row' if len(places) == 1 else 'rows'} {indices(places)}"


def _are(places: list[int]) -> str:
    return "is" if len(places) == 1 else "are"
