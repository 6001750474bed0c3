"""Which blocks form a stage, and how many micro-batches a batch gives."""

from __future__ import annotations

import time
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import Schedule
from lockstep.errors import UsageError
from lockstep.parallel.pipeline import (
    ModelCall,
    argument_names,
    balanced,
    count_for_evaluation,
    count_for_training,
    find_batch,
    measured_split,
    rank_of_stage,
)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(0, 9), st.integers(0, 9), st.data())
def test_the_most_expensive_stage_is_as_cheap_as_any_division_allows(
    costs: list[int], before: int, after: int, data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(costs)))

    def loads(starts: tuple[int, ...]) -> list[int]:
        ends = [*starts[1:], len(costs)]
        found = [sum(costs[start:end]) for start, end in zip(starts, ends, strict=True)]
        found[0] += before
        found[-1] += after
        return found

    every = [loads((0, *rest)) for rest in combinations(range(1, len(costs)), stages - 1)]
    got = loads(tuple(balanced(costs, before, after, stages)))
    assert max(got) == min(map(max, every))
    assert sum(x * x for x in got) == min(sum(x * x for x in one) for one in every if max(one) == max(got))


def test_stages_lie_on_ranks_as_torch_lays_them() -> None:
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

    for schedule, style in ((Schedule.INTERLEAVED, "loop"), (Schedule.ZBV, "v")):
        expected = generate_stage_to_rank_mapping(3, 6, style=style)
        assert {stage: rank_of_stage(schedule, stage, 3) for stage in range(6)} == expected


@pytest.mark.parametrize(
    ("schedule", "batch", "ranks", "expected"),
    [
        ("1f1b", 32, 2, 8),
        ("1f1b", 12, 2, 6),
        ("1f1b", 7, 2, 7),
        ("gpipe", 2, 2, 2),
        ("interleaved", 10, 4, 10),
        ("interleaved", 7, 2, None),  # 7 is no multiple of 7 // 2 rounds
        ("dualpipev", 6, 2, 6),
        ("dualpipev", 2, 2, None),
        ("1f1b", 11, 2, None),
    ],
)
def test_a_batch_gives_four_micro_batches_for_each_rank_or_the_most_that_divide_it(
    schedule: str, batch: int, ranks: int, expected: int | None
) -> None:
    if expected is None:
        with pytest.raises(UsageError, match=f"batch of {batch}"):
            count_for_training(0, batch, Schedule(schedule), ranks)
    else:
        assert count_for_training(0, batch, Schedule(schedule), ranks) == expected


def found_dims(*stated: str) -> tuple[int, dict[str, int | None]]:
    class Model(torch.nn.Module):
        def forward(self, ids: torch.Tensor, **more: object) -> None: ...

    more = {"mask": torch.zeros(1, 6), "extra": {"mask": torch.zeros(8)}, "frames": torch.zeros(6, 8)}
    call = ModelCall((torch.zeros(8, 6),), more, (torch.zeros(8),))
    names = argument_names(Model(), call)
    size, dims = find_batch(Model(), call, stated)
    return size, {names[path]: dim for path, dim in dims.items()}


def test_dim_0_is_the_batch_unless_it_is_stated() -> None:
    dims = {"ids": 0, "mask": None, "extra.mask": 0, "frames": None, "target0": 0}
    assert found_dims() == (8, dims)
    assert found_dims("frames=1", "extra=none") == (8, {**dims, "frames": 1, "extra.mask": None})
    for stated, said in (
        (("idz=0",), "'idz', which is not an argument of the model. Did you mean"),
        (("ids=2",), r"'ids' has shape \(8, 6\)"),
        (("ids=0", "frames=0"), "different sizes: 6, 8"),
    ):
        with pytest.raises(UsageError, match=said):
            found_dims(*stated)


def test_evaluation_takes_any_batch() -> None:
    assert [count_for_evaluation(4, batch, 2) for batch in (8, 6, 5, 3, 1)] == [4, 3, 1, 3, 1]


def test_names_to_split_at_follow_from_the_times() -> None:
    class Sleeps(torch.nn.Module):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.seconds = seconds
            self.inner = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(self.seconds)
            return x

    model = torch.nn.Sequential(Sleeps(0.12), Sleeps(0.02), Sleeps(0.02), Sleeps(0.02))
    assert measured_split(model, 2, torch.zeros(1), blocks=("Sleeps",), repeats=1) == ("1",)
    with pytest.raises(UsageError, match="4 blocks.*5 stages"):
        measured_split(model, 5, torch.zeros(1), blocks=("Sleeps",))
