"""Why a run stands still, from what every rank says of itself.

Who waits for whom makes a graph: a rank in a collective waits for the members of its group that have not entered
it, a rank that receives waits for the one that sends. Those at the end of the chains, who wait for nobody, hold up
the run. Where there is no end, ranks entered different collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.observe.hang.records import Evidence
from lockstep.observe.hang.waits import Waits
from lockstep.observe.hang.wording import (
    MOST_PLACES,
    data_advice,
    entered,
    grouped,
    missed,
    named,
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
        "does not answer: it gets no processor, or one call never releases Python's lock (the GIL",
        "Look at the load of its machine, and at the call with `py-spy dump`: a long regular expression, a C library.",
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
    """Return the reason for which the run stands still, in one sentence and one of advice.

    A rank of which ``facts`` holds nothing counts as silent in the state "absent", unless it has ``ended``: such a
    rank is blamed only for a collective that others have entered and that it has not.
    """
    ended = ended or {}
    seen = {one.rank: one for one in facts if isinstance(one, Evidence) and one.rank not in ended}
    silent = {one.rank: one for one in facts if isinstance(one, Silent)}
    silent = {
        rank: silent.get(rank, Silent(rank, "", 0, 0.0, "absent"))
        for rank in sorted({*silent, *range(world_size)} - {*seen, *ended})
    }
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
    """Return the ranks that are held up by what was found."""
    # Of a mismatch each has entered what the other takes for its own.
    blamed = set(found.ranks) if found.cause in SILENT_CAUSES else None
    return tuple(
        one.rank
        for one in waits.all()
        if found.cause == "mismatch" or (one.awaited if blamed is None else one.awaited & blamed)
    )


def of_ended(ended: Mapping[int, EndedRank], waits: Waits, seen: dict[int, Evidence]) -> Finding | None:
    """Describe ranks that wait for one that has ended without entering their collective: it never will."""
    # Only those that wait for an ended rank themselves: the others wait behind them.
    direct = [wait for wait in waits.all() if wait.awaited & set(ended)]
    if not direct:
        return None
    same = [wait for wait in direct if wait.key == direct[0].key]
    ranks = sorted(frozenset().union(*(wait.awaited for wait in same)) & set(ended))
    gone = " and ".join(
        f"{named(those)} {verb(how, those)}"
        for how, those in grouped((ended[rank].how, rank) for rank in ranks).items()
    )
    waiting = [wait.rank for wait in same]
    where = entered(same[0].collective, seen.get(waiting[0]))
    fact = f"{gone}, and {named(waiting)} {verb('waits', waiting)} for {verb('it', ranks)} in {where}"
    call = next((seen[rank].call for rank in waiting if seen[rank].call in EVERY_RANK), "it")
    return finding("ended", ranks, fact, f"Call {call} on every rank, before any of them ends.")


def of_silence(silent: dict[int, Silent], waits: Waits) -> Finding:
    """Return some ranks do not answer; blames those in one state, the one that explains most."""
    states = grouped((one.state if one.state in SILENCE else "unknown", rank) for rank, one in silent.items())
    # In the order of the table: a lost process outweighs one that is only slow to answer.
    worst = next(state for state in SILENCE if state in states)
    ranks, (cause, words, advice) = states[worst], SILENCE[worst]
    one = silent[ranks[0]]
    who = f"pid {one.pid} on {one.host}; " if one.pid and len(ranks) == 1 else ""
    silence = f"; {who}silent for {one.silent_s:.0f} s" if worst != "absent" else ""
    fact = f"{named(ranks)} {verb(words, ranks)}{silence})"
    waiting = [wait for wait in waits.all() if wait.awaited & set(ranks)]
    if waiting:
        them = f"{named(wait.rank for wait in waiting)} {verb('waits', waiting)} for {verb('it', ranks)}"
        fact += f", and {them} in {entered(waiting[0].collective)}"
    return finding(cause, ranks, fact, advice)


def of_mismatch(waits: Waits, seen: dict[int, Evidence]) -> Finding | None:
    """Describe ranks whose collectives of one group and number are different ones."""
    for wait in waits.all():
        met = waits.meeting(wait)
        sides = grouped(((one.operation, one.sizes, one.dtype), rank) for rank, one in met.items())
        if len(sides) > 1:
            firsts = [met[ranks[0]] for ranks in sides.values()]
            alike = len({(one.operation, one.place) for one in firsts}) == 1
            what = "shapes and dtypes" if alike else "path"
            parts = [(entered(met[side[0]], seen.get(side[0]), True), side) for side in sides.values()]
            found = parted(
                "the ranks are in different collectives",
                parts,
                seen,
                f"Make every rank take the same {what} to this collective.",
            )
            return replace(found, is_lasting=True)
    return None


def of_absence(waits: Waits, seen: dict[int, Evidence]) -> Finding | None:
    """Describe ranks that others wait for and that wait for no other."""
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
        fact += f" ({named(others)} {verb('waits', others)} behind {verb('it', same)})"
    if slow_data := [rank for rank in ranks if is_loading(seen[rank])]:
        return finding("data", slow_data, fact, data_advice(seen[slow_data[0]].place))
    advice = f"Mend what holds {named(ranks)} there, or give the step more time."
    if alone := call_for_every_rank([wait.rank for wait in same], seen):
        advice = f"Call {alone} on every rank, if {named(ranks)} will not call it."
    return finding("missing", ranks, fact, advice)


def of_circle(waits: Waits, seen: dict[int, Evidence]) -> Finding | None:
    """Describe ranks that wait in a circle: they entered collectives in different orders."""
    waiting = [wait for wait in waits.all() if wait.awaited]
    if not waiting:
        return None
    at = {(seen[wait.rank].call, wait.collective.place) for wait in waiting}
    operations = {wait.collective.operation for wait in waiting}
    if len(at) == 1 and len(waiting) == len(seen) and seen[waiting[0].rank].call not in ("", *operations):
        # A call of the library in which the script does the same on all of them, so that it is not to be mended.
        call, place = at.pop()
        fact = f"all ranks are in {call} at {place}, in collectives that do not end"
        advice = "On a busy machine this is only slow; if it does not end, report the stacks (py-spy dump --pid PID)."
        return finding("slow", seen, fact, advice)
    sides = grouped(((wait.key, wait.collective.operation), wait) for wait in waiting).values()
    parts = [
        (entered(side[0].collective, seen.get(side[0].rank)), [wait.rank for wait in side]) for side in sides
    ]
    advice = "Make every rank issue its collectives in the same order."
    return parted("the ranks wait for each other", parts, seen, advice)


def parted(fact: str, sides: list[tuple[str, list[int]]], seen: dict[int, Evidence], advice: str) -> Finding:
    """Return some ranks took another path than others. ``sides``: (what they are in, ranks) of each."""
    sides.sort(key=lambda side: (-len(side[1]), side[1][0]))
    parts = ", ".join(f"{named(ranks)} in {what}" for what, ranks in sides[:MOST_PLACES])
    # The smaller side took another path than most; if the sides are equal, nobody can tell which one is wrong.
    most, few = sides[0][1], [rank for _, ranks in sides[1:] for rank in ranks]
    blamed = few if few and len(few) < len(most) else [*most, *few]
    if alone := call_for_every_rank(blamed, seen):
        blamed = [rank for rank in blamed if seen[rank].call == alone]
        advice = f"Call {alone} on every rank, or on none."
    return finding("mismatch", blamed, f"{fact}: {parts}", advice)


def of_transfer(waits: Waits, seen: dict[int, Evidence]) -> Finding | None:
    """Describe a collective that does not end although all that is needed has been entered."""
    waiting = waits.all()
    if not waiting or len(waiting) < len(seen):
        return None
    where = entered(waiting[0].collective, seen.get(waiting[0].rank))
    fact = f"every rank has entered its collective and none gets out: {named(seen)} in {where}"
    return finding("slow", seen, fact, "Look at the network between the ranks, or at the device's errors.")


def of_slowness(seen: dict[int, Evidence]) -> Finding:
    """Describe ranks of which no one waits for another one."""
    loading = [rank for rank, one in sorted(seen.items()) if is_loading(one)]
    if loading:
        fact = f"{named(loading)} {verb('gets', loading)} no data: {whereabouts(loading, seen)}"
        return finding("data", loading, fact, data_advice(seen[loading[0]].place))
    fact = f"no rank is in a collective and none ends its step: {whereabouts(sorted(seen), seen)}"
    advice = "Look at the stacks of the ranks. If a step only takes longer here, raise hang_timeout."
    return finding("slow", seen, fact, advice)


def is_loading(one: Evidence) -> bool:
    return one.place is not None and "data-loader" in one.place.doing


def call_for_every_rank(ranks: Iterable[int], seen: dict[int, Evidence]) -> str:
    """Return the Accelerator's method that only some ranks are in, if every rank has to call it."""
    for call in sorted({seen[rank].call for rank in ranks if rank in seen} & EVERY_RANK):
        if any(one.call != call for one in seen.values()):
            return call
    return ""


def finding(cause: str, ranks: Iterable[int], fact: str, advice: str) -> Finding:
    short = fact if len(fact) <= LONGEST_FACT else fact[: LONGEST_FACT - 3] + "..."
    return Finding(cause, tuple(sorted(ranks)), f"{short}. {advice}")
