"""Which stage each block belongs to, and which rank each stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from lockstep.config.enums import Schedule
from lockstep.config.pipeline_stages import LOOPED, V_SHAPED
from lockstep.config.values import suggestion
from lockstep.errors import UsageError

SPLIT_BACKWARD = (Schedule.ZERO_BUBBLE, Schedule.ZBV, Schedule.DUALPIPEV)
"""Backward of the weights comes later than that of the input."""


def rank_of_stage(schedule: Schedule, stage: int, ranks: int) -> int:
    """The rank that holds ``stage``: round after round, or there and back for V-shaped schedules."""
    turn, position = divmod(stage, ranks)
    return ranks - 1 - position if schedule in V_SHAPED and turn % 2 else position


def least_micro_batches(schedule: Schedule, ranks: int) -> int:
    """The fewest micro-batches that ``schedule`` works with."""
    return 2 * ranks if schedule is Schedule.DUALPIPEV else ranks


def fits(schedule: Schedule, micro_batches: int, ranks: int) -> bool:
    """Whether ``schedule`` can work with that many micro-batches. Looped ones go in rounds of equal size."""
    if micro_batches < least_micro_batches(schedule, ranks):
        return False
    return schedule not in LOOPED or micro_batches % (micro_batches // ranks) == 0


def balanced(costs: Sequence[float], before: float, after: float, stages: int) -> list[int]:
    """The index at which each stage begins: contiguous stages whose most expensive one is as cheap as can be.

    ``before`` and ``after`` are borne by the first and the last stage. Of equally good ways the most even one
    (least sum of squares) is taken. Every stage gets at least one block.
    """
    blocks = len(costs)
    total = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, end: int) -> float:
        own = total[end] - total[start]
        return own + (before if stage == 0 else 0) + (after if stage == stages - 1 else 0)

    def best(limit: float, squares: bool) -> tuple[float, list[int]]:
        inf = float("inf")
        # found[end]: (least value, starts) of the stages so far, over the first `end` blocks
        found: list[tuple[float, list[int]]] = [(0.0, []), *((inf, []) for _ in range(blocks))]
        for stage in range(stages):
            following: list[tuple[float, list[int]]] = [(inf, [])] * (blocks + 1)
            for end in range(stage + 1, blocks + 1):
                for start in range(stage, end):
                    value, starts = found[start]
                    own = cost(stage, start, end)
                    if value == inf or own > limit:
                        continue
                    new = value + own * own if squares else max(value, own)
                    if new < following[end][0]:
                        following[end] = (new, [*starts, start])
            found = following
        return found[blocks]

    most, _ = best(float("inf"), squares=False)
    return best(most, squares=True)[1]


def begin_at(split: Sequence[str], blocks: Sequence[str], stages: int) -> list[int]:
    """The index at which each stage begins, from the names of the blocks that begin stages but the first.

    Raises:
        UsageError: a name is no block, names are not in order, or there are too many or few.
    """
    for name in split:
        if name not in blocks:
            raise UsageError(
                f"split names '{name}', which is no block of the model.{suggestion(name, list(blocks))} "
                f"Blocks are {blocks[0]} to {blocks[-1]}; choose them with blocks=..."
            )
    if len(split) != stages - 1:
        raise UsageError(
            f"split names {len(split)} blocks at which stages begin, but {stages} stages have {stages - 1} beginnings "
            "after the first. Name as many."
        )
    starts = [0, *(blocks.index(name) for name in split)]
    if any(first >= second for first, second in pairwise(starts)):
        raise UsageError(
            f"split={','.join(split)} is not in the order of the model, or begins a stage with its first block "
            f"'{blocks[0]}'. Name blocks behind the first, in their order."
        )
    return starts
