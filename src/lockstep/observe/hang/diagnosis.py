"""Why a run stands still, from what every rank says of itself.

Who waits for whom makes a graph: a rank in a collective waits for the members of its group that have not entered
it, a rank that receives waits for the one that sends. Those at the end of the chains, who wait for nobody, hold up
the run. Where there is no end, ranks entered collectives that do not belong together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.observe.hang.records import Evidence, PendingCollective
from lockstep.observe.hang.waits import Wait, Waits
from lockstep.observe.hang.wording import (
    MOST_PLACES,
    contents,
    data_advice,
    entered,
    missed,
    named,
    title,
    verb,
    whereabouts,
)
from lockstep.user_call import EVERY_RANK

LONGEST_FACT = 300
SILENT_CAUSES = ("silent", "spinning", "stopped")


@dataclass(frozen=True)
class Silent:
    """A rank that does not answer. ``state`` is its process's: "stopped", "running", "sleeping", "uninterruptible",
    "zombie", "gone" or "unknown"; "absent": it has never been heard of. ``silent_s``: seconds since it last was.
    ``waited_s``: how long its threads have waited for a processor so far."""

    rank: int
    host: str
    pid: int
    silent_s: float
    state: str
    waited_s: float = 0.0


@dataclass(frozen=True)
class EndedRank:
    """A rank that has come to its end, so that nobody may blame it for being still.

    ``how`` says that in words ("has ended with exit code 0"); ``last`` is what it had entered by then, if it said so.
    """

    rank: int
    how: str
    last: Evidence | None = None


@dataclass(frozen=True)
class Finding:
    """Why a run stands still.

    Attributes:
        cause: "missing", "mismatch", "stopped", "spinning", "data", "slow", "silent", "ended".
        ranks: Those that hold up the others.
        sentence: What happened, with names, numbers and lines, and then what to do.
        waiting: The ranks that wait for another one. Where there are none, the ranks may only be busy.
        is_lasting: It cannot end by itself: the ranks take different collectives for one and the same.
    """

    cause: str
    ranks: tuple[int, ...]
    sentence: str
    waiting: tuple[int, ...] = ()
    is_lasting: bool = False


# State -> cause, what it means, what to do; where ranks differ, the first counts.
SILENCE = {
    "gone": ("silent", "has lost its process (it is gone", "See its output, and the kernel's log (OOM)."),
    "zombie": ("silent", "has ended and was not collected (a zombie", "See its output for the reason."),
    "stopped": ("stopped", "is stopped (SIGSTOP or a debugger", "Let it go on with `kill -CONT`, or end it."),
    "running": (
        "spinning",
        "computes without answering: code that never releases Python's lock (the GIL",
        "Look there for a long regular expression or a call into a C library; `py-spy dump` shows it.",
    ),
    "uninterruptible": (
        "silent",
        "waits in the kernel for a disk, a network file system or a device (state D",
        "Look at the file systems and devices of its machine.",
    ),
    "sleeping": (
        "silent",
        "sleeps without answering: a call into C that keeps Python's lock (the GIL",
        "Look at its stack with `py-spy dump --native` or gdb.",
    ),
    "unknown": (
        "silent",
        "does not answer (its machine or its network may be down",
        "Check whether its machine can be reached.",
    ),
    "absent": (
        "silent",
        "has made no Accelerator yet (a process may still import or load something",
        "See what its script does before that line.",
    ),
}


def diagnose(
    facts: Sequence[Evidence | Silent], world_size: int, ended: Mapping[int, EndedRank] | None = None
) -> Finding:
    """The reason for which the run stands still, in one sentence and one of advice.

    A rank of which ``facts`` holds nothing counts as silent in the state "absent", unless it has ``ended``: such a
    rank is blamed only for a collective that others have entered and that it has not.
    """
    ended = ended or {}
    seen = {one.rank: one for one in facts if isinstance(one, Evidence) and one.rank not in ended}
    silent = {one.rank: one for one in facts if isinstance(one, Silent) and one.rank not in {*seen, *ended}}
    for rank in range(world_size):
        if rank not in seen and rank not in silent and rank not in ended:
            silent[rank] = Silent(rank, "", 0, 0.0, "absent")
    waits = Waits(seen, world_size, {rank: one.last for rank, one in ended.items()})
    # From what is certain to what is only likely. A rank that is gone explains everything that waits for it.
    found = (
        of_ended(ended, waits, seen)
        or (of_silence(silent, waits) if silent else None)
        or of_mismatch(waits, seen)
        or of_absence(waits, seen)
        or of_circle(waits, seen)
        or of_transfer(waits, seen)
        or of_slowness(seen)
    )
    return replace(found, waiting=waiting_for(found, waits))


def waiting_for(found: Finding, waits: Waits) -> tuple[int, ...]:
    """The ranks that are held up by what was found."""
    # Each has entered what the other takes for its own.
    if found.cause == "mismatch":
        return tuple(one.rank for one in waits.all())
    if found.cause in SILENT_CAUSES:
        return tuple(one.rank for one in waits.all() if one.awaited & set(found.ranks))
    return tuple(one.rank for one in waits.all() if one.awaited)


def of_ended(ended: Mapping[int, EndedRank], waits: Waits, seen: dict[int, Evidence]) -> Finding | None:
    """Ranks wait for one that has ended without entering their collective: it never will."""
    # Only those that wait for an ended rank themselves: the others wait behind them.
    direct = [wait for wait in waits.all() if wait.awaited & set(ended)]
    if not direct:
        return None
    same = [wait for wait in direct if wait.key == direct[0].key]
    ranks = sorted(frozenset().union(*(wait.awaited for wait in same)) & set(ended))
    how: dict[str, list[int]] = {}
    for rank in ranks:
        how.setdefault(ended[rank].how, []).append(rank)
    gone = " and ".join(f"{named(those)} {verb(words, those)}" for words, those in how.items())
    waiting = [wait.rank for wait in same]
    fact = (
        f"{gone}, and {named(waiting)} {verb('waits', waiting)} for {'it' if len(ranks) == 1 else 'them'} in "
    )
    call = next((seen[rank].call for rank in waiting if seen[rank].call in EVERY_RANK), "")
    advice = f"Call {call or 'it'} on every rank, before any of them ends."
    return finding("ended", ranks, fact + entered(same, seen), advice)


def of_silence(silent: dict[int, Silent], waits: Waits) -> Finding:
    """Some ranks do not answer; blames those in one state, the one that explains most."""
    states = {rank: one.state if one.state in SILENCE else "unknown" for rank, one in sorted(silent.items())}
    # In the order of the table: a lost process outweighs one that is only slow to answer.
    worst = next(state for state in SILENCE if state in states.values())
    ranks = [rank for rank, state in states.items() if state == worst]
    cause, words, advice = SILENCE[worst]
    one = silent[ranks[0]]
    who = f"pid {one.pid} on {one.host}; " if one.pid and len(ranks) == 1 else ""
    silence = f"; {who}silent for {one.silent_s:.0f} s" if worst != "absent" else ""
    fact = f"{named(ranks)} {verb(words, ranks)}{silence})"
    waiting = [wait for wait in waits.all() if wait.awaited & set(ranks)]
    if waiting:
        fact += f", and {named(wait.rank for wait in waiting)} {verb('waits', waiting)} for " + (
            f"{'it' if len(ranks) == 1 else 'them'} in {entered(waiting)}"
        )
    return finding(cause, ranks, fact, advice)


def of_mismatch(waits: Waits, seen: dict[int, Evidence]) -> Finding | None:
    """Ranks whose collective of one group and number are different ones."""
    for wait in waits.all():
        sides: dict[tuple[str, str, str], list[tuple[int, PendingCollective]]] = {}
        for rank, one in waits.meeting(wait).items():
            sides.setdefault((one.operation, one.sizes, one.dtype), []).append((rank, one))
        if len(sides) > 1:
            return of_sides(list(sides.values()), seen)
    return None


def of_sides(sides: list[list[tuple[int, PendingCollective]]], seen: dict[int, Evidence]) -> Finding:
    sides.sort(key=lambda side: (-len(side), side[0][0]))
    has_one_operation = len({side[0][1].operation for side in sides}) == 1
    parts = []
    for side in sides[:MOST_PLACES]:
        ranks, one = [rank for rank, _ in side], side[0][1]
        at = f" at {one.place}" if one.place else ""
        parts.append(f"{named(ranks)} in {title(one, seen.get(ranks[0]))} of {contents(one)}{at}")
    few = [rank for side in sides[1:] for rank, _ in side]
    # The smaller side took another path than most; if the sides are equal, nobody can tell which one is wrong.
    blamed = sorted(few if len(few) < len(sides[0]) else [*few, *(rank for rank, _ in sides[0])])
    fact = "the ranks are in collectives that do not belong together: " + ", ".join(parts)
    if alone := call_for_every_rank(blamed, seen):
        blamed = [rank for rank in blamed if seen[rank].call == alone]
        advice = f"Call {alone} on every rank, or on none."
    else:
        is_one_line = len({side[0][1].place for side in sides}) == 1
        what = "shapes and dtypes" if has_one_operation and is_one_line else "path"
        advice = f"Make every rank take the same {what} to this collective."
    return replace(finding("mismatch", blamed, fact, advice), is_lasting=True)


def of_absence(waits: Waits, seen: dict[int, Evidence]) -> Finding | None:
    """Ranks that others wait for and that wait for nobody."""
    ends = waits.ends()
    direct = [wait for wait in waits.all() if wait.awaited & ends]
    if not direct:
        return None
    # The collective in which most ranks wait.
    first = max(direct, key=lambda wait: (sum(1 for other in direct if other.key == wait.key), -wait.rank))
    same = [wait for wait in direct if wait.key == first.key]
    ranks = sorted(first.awaited & ends)
    others = sorted({wait.rank for wait in waits.all()} - {wait.rank for wait in same} - set(ranks))
    fact = f"{named(ranks)} {missed(first, same, seen)}; {whereabouts(ranks, seen)}"
    if others:
        fact += f" ({named(others)} {verb('waits', others)} behind {'it' if len(same) == 1 else 'them'})"
    slow_data = [rank for rank in ranks if is_loading(seen[rank])]
    if slow_data:
        return finding("data", slow_data, fact, data_advice(seen[slow_data[0]].place))
    if alone := call_for_every_rank([wait.rank for wait in same], seen):
        return finding(
            "missing", ranks, fact, f"Call {alone} on every rank, if {named(ranks)} will not call it."
        )
    return finding(
        "missing",
        ranks,
        fact,
        f"Mend what holds {named(ranks)} there, or give the step more time.",
    )


def of_circle(waits: Waits, seen: dict[int, Evidence]) -> Finding | None:
    """Every rank waits for another one that waits too: they entered collectives in different orders."""
    waiting = [wait for wait in waits.all() if wait.awaited]
    if not waiting:
        return None
    keys: dict[object, list[Wait]] = {}
    for wait in waiting:
        keys.setdefault((wait.key, wait.collective.operation), []).append(wait)
    sides = sorted(keys.values(), key=lambda side: (-len(side), side[0].rank))
    at = {(seen[wait.rank].call, wait.collective.place) for wait in waiting}
    operations = {wait.collective.operation for wait in waiting}
    if len(at) == 1 and len(waiting) == len(seen) and seen[waiting[0].rank].call not in ("", *operations):
        # A call of the library in which the script does the same on all of them, so that it is not to be mended.
        call, place = at.pop()
        fact = f"all ranks are in {call} at {place}, in collectives of which none ends"
        return finding("slow", seen, fact, "Look at their stacks with `lockstep top`, and report them.")
    parts = [f"{named(w.rank for w in side)} in {entered(side, seen)}" for side in sides[:MOST_PLACES]]
    few = [wait.rank for side in sides[1:] for wait in side]
    blamed = sorted(few if few and len(few) < len(sides[0]) else [wait.rank for wait in waiting])
    fact = "the ranks wait for each other: " + ", ".join(parts)
    if alone := call_for_every_rank(blamed, seen):
        blamed = [rank for rank in blamed if seen[rank].call == alone]
        return finding("mismatch", blamed, fact, f"Call {alone} on every rank, or on none.")
    return finding("mismatch", blamed, fact, "Make every rank issue its collectives in the same order.")


def of_transfer(waits: Waits, seen: dict[int, Evidence]) -> Finding | None:
    """All that is needed has been entered, and yet it does not end."""
    waiting = waits.all()
    if not waiting:
        return None
    idle = {rank for rank, one in seen.items() if rank not in {wait.rank for wait in waiting}}
    if idle:
        return None
    fact = (
        f"every rank has entered its collective and none gets out: {named(seen)} in {entered(waiting, seen)}"
    )
    return finding(
        "slow", list(seen), fact, "Look at the network between the ranks, or at the device's errors."
    )


def of_slowness(seen: dict[int, Evidence]) -> Finding:
    """No rank waits for another one."""
    loading = [rank for rank, one in sorted(seen.items()) if is_loading(one)]
    if loading:
        fact = f"{named(loading)} {verb('gets', loading)} no data: {whereabouts(loading, seen)}"
        return finding("data", loading, fact, data_advice(seen[loading[0]].place))
    fact = f"no rank is in a collective and none ends its step: {whereabouts(sorted(seen), seen)}"
    return finding(
        "slow",
        sorted(seen),
        fact,
        "Look at the stacks of the ranks. If a step only takes longer here, raise hang_timeout.",
    )


def is_loading(one: Evidence) -> bool:
    return one.place is not None and "data-loader" in one.place.doing


def call_for_every_rank(ranks: Iterable[int], seen: dict[int, Evidence]) -> str:
    """The Accelerator's method that only some ranks are in, if every rank has to call it."""
    for call in sorted({seen[rank].call for rank in ranks if rank in seen} & EVERY_RANK):
        if any(one.call != call for one in seen.values()):
            return call
    return ""


def finding(cause: str, ranks: Iterable[int], fact: str, advice: str) -> Finding:
    short = fact if len(fact) <= LONGEST_FACT else fact[: LONGEST_FACT - 3] + "..."
    return Finding(cause, tuple(sorted(ranks)), f"{short}. {advice}")
