"""The words in which a diagnosis names ranks, collectives and lines of code."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence, Sized
from typing import TypeVar

from lockstep.observe.hang.records import Evidence, PendingCollective, SourceLine
from lockstep.observe.hang.waits import Wait
from lockstep.words import runs_of

GroupKey = TypeVar("GroupKey", bound=Hashable)
Grouped = TypeVar("Grouped")
MOST_PLACES = 3
WAITED = ("item", "tolist", "cpu", "numpy", "synchronize")
# Operation -> what a missing rank did not do, and what the others do meanwhile.
TRANSFERS = {
    "recv": ("never sent what", "waits for"),
    "irecv": ("never sent what", "waits for"),
    "send": ("never received what", "sends"),
    "isend": ("never took part in the send or receive in which", "waits"),
    "send/recv": ("never took part in the send or receive in which", "waits"),
}
PLURALS = {
    "is": "are",
    "it": "them",
    "has": "have",
    "does": "do",
    "waits": "wait",
    "gets": "get",
    "sends": "send",
    "computes": "compute",
    "sleeps": "sleep",
    "entered": "entered",
}
# What a line says that is in a loader -> advice; the first that fits.
DATA_ADVICE = {
    "stopped": "Let the stopped worker go on with `kill -CONT`, or end it.",
    "dead": "See the kernel's log for the reason (OOM), and let the workers use less memory.",
    "": "Make the dataset's __getitem__ faster or use more workers; py-spy shows what they do.",
}


def grouped(pairs: Iterable[tuple[GroupKey, Grouped]]) -> dict[GroupKey, list[Grouped]]:
    """Return the members of each key, in their order."""
    found: dict[GroupKey, list[Grouped]] = {}
    for key, member in pairs:
        found.setdefault(key, []).append(member)
    return found


def missed(first: Wait, same: Sequence[Wait], seen: dict[int, Evidence]) -> str:
    """Say what ranks missed: "never joined all_reduce #412 that ranks 0, 2 entered at train.py:57"."""
    one = first.collective
    what, did = TRANSFERS.get(one.operation, TRANSFERS["send/recv"])
    if one.peer is None and one.operation not in TRANSFERS:
        what, did = f"never joined {title(one, seen.get(first.rank))} that", "entered"
    places = grouped((_at(wait.collective), wait.rank) for wait in same)
    words = [
        f"{named(ranks)}{'' if number else f' {verb(did, ranks)}'}{place}"
        for number, (place, ranks) in enumerate(list(places.items())[:MOST_PLACES])
    ]
    return f"{what} {' and '.join(words)}"


def entered(one: PendingCollective, evidence: Evidence | None = None, with_contents: bool = False) -> str:
    """Say what a rank is in, and where: "all_reduce #412 at train.py:57"."""
    contents = " ".join(part for part in (one.dtype, one.sizes) if part) or "nothing"
    return f"{title(one, evidence)}{f' of {contents}' if with_contents else ''}{_at(one)}"


def title(one: PendingCollective, evidence: Evidence | None) -> str:
    """Name a collective: "all_reduce #412", with what the user called where that has another name."""
    number = f" #{one.number}" if one.number is not None and one.peer is None else ""
    if evidence is None:
        return f"{one.operation}{number}"
    # Without a place it is not what the rank is in.
    call = evidence.call if one.place else ""
    called = f" ({call})" if call not in ("", one.operation, "wait", *WAITED) else ""
    members = evidence.groups.get(one.group, ())
    is_part = members and any(len(other) > len(members) for other in evidence.groups.values())
    return f"{one.operation}{number}{called}{f' of {named(members)}' if is_part else ''}"


def whereabouts(ranks: Sequence[int], seen: dict[int, Evidence]) -> str:
    """Say where ranks are: "rank 1 is at data.py:88 in slow_fetch", those that are at one place together."""
    places = grouped((describe_line(seen[rank].place), rank) for rank in ranks)
    parts = [f"{named(at)} {verb('is', at)} {place}" for place, at in list(places.items())[:MOST_PLACES]]
    return ", ".join(parts) + (" and others elsewhere" if len(places) > MOST_PLACES else "")


def describe_line(place: SourceLine | None) -> str:
    if place is None:
        return "at an unknown line"
    where = "" if place.function == "<module>" else f" in {place.function[-60:]}"
    doing = f", {place.doing}" if place.doing else ""
    return f"at {place.file[-60:]}:{place.line}{where}{doing}"


def data_advice(place: SourceLine | None) -> str:
    doing = place.doing if place else ""
    return next(advice for word, advice in DATA_ADVICE.items() if word in doing)


def named(ranks: Iterable[int]) -> str:
    """Name ranks: "rank 1", "ranks 0, 2-5"."""
    numbers = set(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(runs_of(numbers, '-'))}"


def verb(words: str, ranks: Sized) -> str:
    """Return the words, whose first is one of ``PLURALS``, as they suit one or several ranks."""
    first, space, rest = words.partition(" ")
    return f"{first if len(ranks) == 1 else PLURALS[first]}{space}{rest}"


def _at(one: PendingCollective) -> str:
    return f" at {one.place}" if one.place else ""
