"""Known shapes of differences are named; others, and rounding, are not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.verify import ItemKind, RunFacts, TraceItem, sentence
from tests.verify.runs import ranks_of, synthetic, verdict_of

Ranks = list[dict[TraceItem, Tensor]]
Plant = Callable[[Ranks, dict[TraceItem, Tensor]], None]

GRADIENT = TraceItem(2, ItemKind.GRADIENT, "second.weight")
CLIPPED = GRADIENT._replace(kind=ItemKind.CLIPPED)
UPDATE = GRADIENT._replace(kind=ItemKind.UPDATE)
WEIGHT = TraceItem(0, ItemKind.WEIGHT, "second.weight")
BUFFER = TraceItem(2, ItemKind.BUFFER, "first.mean")
NORM = TraceItem(2, ItemKind.NORM, "")
RATE = TraceItem(1, ItemKind.RATE, "")
LOSS = TraceItem(2, ItemKind.LOSS, "", data_rank=1)
OUTPUT = TraceItem(1, ItemKind.OUTPUT, "first", data_rank=1)
BATCH = TraceItem(1, ItemKind.BATCH, "", data_rank=1, path="x")


def facts(data_ranks: int, accumulation_steps: int = 1, **axes: int) -> RunFacts:
    size = data_ranks * math.prod(axes.values())
    return RunFacts("", "ddp", size, data_ranks, accumulation_steps, axes, "fp32", 2, 2)


def times(factor: float, item: TraceItem = GRADIENT, on: tuple[int, ...] | None = None) -> Plant:
    def plant(ranks: Ranks, tensors: dict[TraceItem, Tensor]) -> None:
        for rank, local in enumerate(ranks):
            if item in local and (on is None or rank in on):
                local[item] = local[item] * factor

    return plant


def becomes(
    item: TraceItem, value: Callable[[dict[TraceItem, Tensor]], Tensor], on: tuple[int, ...] | None = None
) -> Plant:
    def plant(ranks: Ranks, tensors: dict[TraceItem, Tensor]) -> None:
        other = value(tensors)
        for rank, local in enumerate(ranks):
            if item in local and (on is None or rank in on):
                local[item] = other

    return plant


def own_parts(item: TraceItem, of: Callable[[Tensor, list[Tensor], int], Tensor], groups: int = 0) -> Plant:
    """``of``: (what all should have, as many tensors with the sum zero, rank) to what the rank has."""

    def plant(ranks: Ranks, tensors: dict[TraceItem, Tensor]) -> None:
        whole = tensors[item]
        number = groups or len(ranks)
        parts = [whole.std().clamp(min=1) * torch.randn(whole.shape) for _ in range(number)]
        mean = torch.stack(parts).mean(0)
        for rank, local in enumerate(ranks):
            local[item] = of(whole, [one - mean for one in parts], rank * number // len(ranks))

    return plant


def batch_of(change: Callable[[Tensor, Tensor], Tensor]) -> Plant:
    """``change``: (rows of data rank 1, those of data rank 0) to what data rank 1 reads."""
    return becomes(BATCH, lambda all_: change(all_[BATCH].clone(), all_[BATCH._replace(data_rank=0)]))


TWO, FOUR = facts(2), facts(4)
CASES: dict[str, tuple[RunFacts, Plant, TraceItem, tuple[int, ...] | None, str]] = {
    # name: (runs, what goes wrong, where, on which ranks if not all, what it looks like)
    "sum for mean": (TWO, times(2), GRADIENT, None, "summed over 2 ranks in place of averaged"),
    "mean twice": (TWO, times(0.5), GRADIENT, None, "divided by the 2 ranks once too often"),
    "mean of half the ranks": (FOUR, times(2, on=(2, 3)), GRADIENT, (2, 3), "averaged over 2 of 4 ranks"),
    "micro-batches summed": (
        facts(2, 8),
        times(8),
        GRADIENT,
        None,
        "summed over 8 accumulation steps in place",
    ),
    "copies of tp counted": (facts(1, tp=2), times(2), GRADIENT, None, "summed over 2 ranks of tp"),
    "sign": (TWO, times(-1), GRADIENT, None, "sign was turned"),
    "scale of the loss": (TWO, times(65536), GRADIENT, None, "scale of the loss, 65,536"),
    "not averaged": (
        TWO,
        own_parts(GRADIENT, lambda w, p, r: w + p[r]),
        GRADIENT,
        None,
        "not averaged.*mean of what rank 0 and rank 1 hold",
    ),
    "not summed": (TWO, own_parts(GRADIENT, lambda w, p, r: w / 2 + p[r]), GRADIENT, None, "not summed"),
    "a copy left out": (
        FOUR,
        becomes(WEIGHT, lambda all_: torch.randn(8, 8), (3,)),
        WEIGHT,
        (3,),
        "ranks 0 to 2 agree.*rank 3 was left out",
    ),
    "zeros": (TWO, times(0), GRADIENT, None, "never computed"),
    "a step skipped": (TWO, times(0, UPDATE, (1,)), UPDATE, (1,), "step was skipped on rank 1"),
    "not finite": (TWO, times(float("nan"), on=(0,)), GRADIENT, (0,), "64 elements of rank 0 are NaN"),
    "stale": (
        TWO,
        becomes(GRADIENT, lambda all_: all_[GRADIENT._replace(step=1)]),
        GRADIENT,
        None,
        "that of the step before, step 1",
    ),
    "rate by ranks": (TWO, times(2, RATE), RATE, None, "multiplied by the 2 ranks"),
    "rows of another rank": (
        TWO,
        batch_of(lambda own, other: other),
        BATCH,
        (1,),
        "read twice: rows 0 to 3 are also in another batch",
    ),
    "rows in order": (
        TWO,
        batch_of(lambda own, other: own.flip(0)),
        BATCH,
        (1,),
        "same in another order: 4 of 4",
    ),
    "a row twice": (
        TWO,
        batch_of(lambda own, other: torch.stack([own[0], own[0], own[2], own[3]])),
        BATCH,
        (1,),
        "1 row is in it more than once",
    ),
    "another seed": (TWO, batch_of(lambda own, other: own + 1), BATCH, (1,), "another seed"),
    "nothing known": (TWO, becomes(GRADIENT, lambda all_: torch.randn(8, 8)), GRADIENT, None, "^$"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_difference_is_named(name: str, tmp_path: Path) -> None:
    runs, plant, item, on, looks_like = CASES[name]
    torch.manual_seed(7)
    tensors = synthetic(data_ranks=runs.data_ranks)
    ranks = ranks_of(tensors, runs.nproc, runs.data_ranks)
    plant(ranks, tensors)
    verdict = verdict_of(tmp_path, tensors, ranks, facts=runs)
    first = verdict.findings[0]
    assert first.item == item, sentence(verdict)
    assert first.ranks == (on or tuple(range(runs.nproc)))
    assert re.search(looks_like, first.looks_like), sentence(verdict)
    assert len(verdict.findings) == 1


@pytest.mark.parametrize("seed", range(3))
def test_rounding_is_no_difference(seed: int, tmp_path: Path) -> None:
    tensors = synthetic(data_ranks=4, seed=seed)
    verdict = verdict_of(tmp_path, tensors, ranks_of(tensors, 4, seed=1000 + seed), facts=FOUR)
    assert verdict.agrees, sentence(verdict)
