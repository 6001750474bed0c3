"""What a pipeline is asked for, and what follows: the stage of each block, the rank of each stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch

from lockstep.config.enums import Schedule
from lockstep.config.parallel_words import LOOPED, V_SHAPED
from lockstep.config.values import suggestion
from lockstep.errors import UsageError

OutputsMode = Literal["auto", "all", "last"]
LossReduction = Literal["auto", "mean", "sum", "whole"]


@dataclass(frozen=True)
class PipelineOptions:
    """How a model is split by depth and in which order its stages work.

    Args:
        schedule: The order of forwards and backwards.
        micro_batches: Parts that a batch is cut into; 0: chosen (four for each rank, if the batch divides).
        stages_per_rank: Stages that each rank holds; 0: what the schedule needs.
        split: Names of the blocks at which stages begin, without the first; () balances the stages.
        batch_dims: ``name=dim`` or ``name=none`` for arguments: which dimension is cut into micro-batches. Of those
            that are not named it is dim 0, if that is as long as the batch.
        loss_reduction: What the loss of the batch is of those of its micro-batches. ``whole``: neither mean nor sum,
            so that what comes after the last block is computed on the whole batch at once. ``auto``: a mean, which is
            checked in each step; a sum where the call has ``num_items_in_batch``.
        outputs: Which ranks get the model's outputs. ``all``: all. ``last``: the rank of the last stage, the
            others None. ``auto``: all, but only the loss where the model computes it for training.
        loss_scale: The factor (a power of two) by which losses are multiplied while gradients are computed in
            float16; it is divided out of the gradients again.
        forward_dtype: The type of parameters in forwards, where they are gathered in another than their own.
    """

    schedule: Schedule = Schedule.ONE_F_ONE_B
    micro_batches: int = 0
    stages_per_rank: int = 0
    split: tuple[str, ...] = ()
    batch_dims: tuple[str, ...] = ()
    loss_reduction: LossReduction = "auto"
    outputs: OutputsMode = "auto"
    loss_scale: Callable[[], float] | None = None
    forward_dtype: torch.dtype | None = None


SPLIT_BACKWARD = (Schedule.ZERO_BUBBLE, Schedule.ZBV, Schedule.DUALPIPEV)
"""Backward of the weights comes later than that of the input."""


def rank_of_stage(schedule: Schedule, stage: int, ranks: int) -> int:
    """Return the rank that holds ``stage``: round after round, or there and back for V-shaped schedules."""
    turn, position = divmod(stage, ranks)
    return ranks - 1 - position if schedule in V_SHAPED and turn % 2 else position


def least_micro_batches(schedule: Schedule, ranks: int) -> int:
    """Return the fewest micro-batches that ``schedule`` works with."""
    return 2 * ranks if schedule is Schedule.DUALPIPEV else ranks


def fits(schedule: Schedule, micro_batches: int, ranks: int) -> bool:
    """Return whether ``schedule`` can work with that many micro-batches. Looped ones go in rounds of equal size."""
    if micro_batches < least_micro_batches(schedule, ranks):
        return False
    # As torch: rounds = micro_batches // ranks, and each round has micro_batches / rounds of them.
    return schedule not in LOOPED or micro_batches % (micro_batches // ranks) == 0


def balanced(costs: Sequence[float], before: float, after: float, stages: int) -> list[int]:
    """Return the index at which each stage begins: contiguous stages whose most expensive one is as cheap as can be.

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

    # Dynamic programming, twice: first the least possible maximum, then the most even split within it.
    most, _ = best(float("inf"), squares=False)
    return best(most, squares=True)[1]


def begin_at(split: Sequence[str], blocks: Sequence[str], stages: int) -> list[int]:
    """Return the index at which each stage begins, from the names of the blocks that begin stages but the first.

    Raises:
        UsageError: a name is no block, names are not in order, or there are too many or few.
    """
    for name in split:
        if name not in blocks:
            raise UsageError(
                f"split names '{name}', which is not a block of the model.{suggestion(name, list(blocks))} "
                f"The blocks are {blocks[0]} to {blocks[-1]}; choose others with blocks=..."
            )
    if len(split) != stages - 1:
        raise UsageError(
            f"split names {len(split)} blocks at which stages begin, but {stages} stages need {stages - 1} "
            f"names: the first block of each stage after the first. Name {stages - 1} blocks."
        )
    starts = [0, *(blocks.index(name) for name in split)]
    if any(first >= second for first, second in pairwise(starts)):
        raise UsageError(
            f"split={','.join(split)} is not in the order of the model, or begins a stage with its first block "
            f"'{blocks[0]}'. Name blocks after the first one, in the order of the model."
        )
    return starts
