"""What the watch knows of the ranks of a run, as values that travel as JSON to people who look on."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lockstep.observe.hang.diagnosis import Ended
from lockstep.observe.hang.ranks import WatchedRank

MOST_RANKS = 512


def ranks_of(
    ranks: Mapping[int, WatchedRank], ended: Mapping[int, Ended], slow: Collection[int], now: float
) -> list[dict[str, object]]:
    """Of each rank, stragglers first, then by number, at most 512: ``rank``, ``host``, ``pid``; ``steps``, of which the
    loop has come to the end; ``part`` of a step that it is in; ``still_s`` since it got anything done, ``silent_s``
    since it was heard of; ``own_s`` of a step without waits for others, ``step_s``; ``is_slow``; ``ended``, how, or "".
    """
    order = sorted(ranks, key=lambda rank: (rank not in slow, rank))[:MOST_RANKS]
    return [
        {
            "rank": rank,
            "host": state.host[:200],
            "pid": state.pid,
            "steps": state.boundaries,
            "part": "end_training" if state.is_ending or state.is_done else state.part,
            "still_s": max(now - state.progressed, 0.0),
            "silent_s": max(now - state.heard, 0.0),
            "own_s": state.local_s,
            "step_s": state.step_s,
            "is_slow": rank in slow,
            "ended": ended[rank].how if rank in ended else "",
        }
        for rank, state in ((rank, ranks[rank]) for rank in order)
    ]
