"""The words in which a diagnosis names ranks, collectives and lines of code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.observe.hang.records import Evidence, PendingCollective, SourceLine
from lockstep.observe.hang.waits import Wait
from lockstep.words import runs_of

MOST_PLACES = 3


def missed(first: Wait, same: Sequence[Wait], seen: dict[int, Evidence]) -> str:
    """ "never joined all_reduce #412 that ranks 0, 2 entered at train.py:57" """
    one = first.collective
    if one.peer is not None or one.operation in ("send/recv", "send", "recv", "isend", "irecv"):
        words = {"recv": "never sent what", "irecv": "never sent what", "send": "never received what"}
        doing = {"recv": "waits for", "irecv": "waits for", "send": "sends"}
        what = words.get(one.operation, "never took part in the send or receive in which")
        return f"{what} {places_of(same, doing.get(one.operation, 'waits'))}"
    return f"never joined {title(one, seen.get(first.rank))} that {places_of(same, 'entered')}"


def places_of(waits: Sequence[Wait], did: str) -> str:
    """ "ranks 0, 2 entered at train.py:57 and rank 3 at train.py:60" """
    parts: dict[str, list[int]] = {}
    for wait in waits:
        parts.setdefault(f" at {wait.collective.place}" if wait.collective.place else "", []).append(
            wait.rank
        )
    words = []
    for number, (place, ranks) in enumerate(list(parts.items())[:MOST_PLACES]):
        done = did if did == "entered" else verb(did, ranks)
        words.append(f"{named(ranks)} {done}{place}" if number == 0 else f"{named(ranks)}{place}")
    return " and ".join(words)


def entered(waits: Sequence[Wait], seen: dict[int, Evidence] | None = None) -> str:
    """ "all_reduce #412 at train.py:57" """
    one = waits[0].collective
    at = f" at {one.place}" if one.place else ""
    return f"{title(one, (seen or {}).get(waits[0].rank))}{at}"


def title(one: PendingCollective, evidence: Evidence | None) -> str:
    """ "all_reduce #412", with what the user called where that has another name."""
    number = f" #{one.number}" if one.number is not None and one.peer is None else ""
    # Without a place it is not what the rank is in.
    call = evidence.call if evidence and one.place else ""
    called = f" ({call})" if call and call not in (one.operation, "wait", *WAITED) else ""
    among = ""
    members = (evidence.groups if evidence else {}).get(one.group, ())
    if evidence and members and any(len(other) > len(members) for other in evidence.groups.values()):
        among = f" of {named(members)}"
    return f"{one.operation}{number}{called}{among}"


WAITED = ("item", "tolist", "cpu", "numpy", "synchronize")


def contents(one: PendingCollective) -> str:
    return " ".join(part for part in (one.dtype, one.sizes) if part) or "nothing"


def whereabouts(ranks: Sequence[int], seen: dict[int, Evidence]) -> str:
    """ "rank 1 is at data.py:88 in slow_fetch", ranks that are at one place together."""
    places: dict[str, list[int]] = {}
    for rank in ranks:
        places.setdefault(describe_line(seen[rank].place), []).append(rank)
    parts = [f"{named(at)} {verb('is', at)} {place}" for place, at in list(places.items())[:MOST_PLACES]]
    rest = " and others elsewhere" if len(places) > MOST_PLACES else ""
    return ", ".join(parts) + rest


def describe_line(place: SourceLine | None) -> str:
    if place is None:
        return "at an unknown line"
    where = "" if place.function == "<module>" else f" in {place.function[-60:]}"
    doing = f", {place.doing}" if place.doing else ""
    return f"at {place.file[-60:]}:{place.line}{where}{doing}"


def data_advice(place: SourceLine | None) -> str:
    doing = place.doing if place else ""
    if "stopped" in doing:
        return "Let the stopped worker go on with `kill -CONT`, or end it."
    if "dead" in doing:
        return "See the kernel's log for the reason (OOM), and let the workers use less memory."
    return "Make the dataset's __getitem__ faster or use more workers; py-spy shows what they do."


def named(ranks: Iterable[int]) -> str:
    """ "rank 1", "ranks 0, 2-5"."""
    numbers = set(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(runs_of(numbers, '-'))}"


PLURALS = {
    "is": "are",
    "waits": "wait",
    "gets": "get",
    "sends": "send",
    "computes": "compute",
    "sleeps": "sleep",
}


PLURALS |= {"has": "have", "does": "do"}


def verb(words: str, ranks: Sequence[object]) -> str:
    """The words, whose first is a verb in the third person, as they suit one or several ranks."""
    first, space, rest = words.partition(" ")
    return f"{first if len(ranks) == 1 else PLURALS[first]}{space}{rest}"
