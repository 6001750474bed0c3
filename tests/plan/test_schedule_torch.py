"""torch's schedules: read without processes as they run with them, and their bubbles as the papers count them."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from lockstep import Accelerator
from lockstep.config import Schedule
from lockstep.errors import ConfigError
from lockstep.plan import RULES, Times, action_lists, by_rank, checked, compared, simulate
from tests.refusals import expect_refusal

SIZES = [(2, 2), (2, 8), (4, 4), (4, 8), (4, 10), (8, 16)]


def promised(name: str, p: int, m: int, v: int) -> Fraction | None:
    """Idle / (idle + useful) with F = I = W, written out from the papers."""
    fractions: dict[str, Callable[[], Fraction | None]] = {
        "gpipe": lambda: Fraction(p - 1, m + p - 1),
        "1f1b": lambda: Fraction(p - 1, m + p - 1),
        "interleaved": lambda: Fraction(p - 1, v * m + p - 1),
        "zero_bubble": lambda: Fraction(p - 1, 3 * v * m + p - 1),  # a third of the idle time of 1F1B
        "zbv": lambda: Fraction(p - 1, 6 * m + p - 1) if m >= 2 * p - 1 else None,
        "dualpipev": lambda: Fraction(2 * (p - 1), 6 * m + 2 * (p - 1)),
    }
    return fractions[name]()


@pytest.mark.parametrize("name", Schedule.list())
def test_the_bubble_of_the_actions_is_that_of_the_formula(name: str) -> None:
    compared_sizes = 0
    for p, m in SIZES:
        for v in (1, 2, 3):
            try:
                _, stages = checked(name, p, m, v)
            except ConfigError:
                continue
            timeline = simulate(action_lists(name, p, m, v))
            expected = promised(name, p, m, stages)
            if expected is None:
                continue
            assert Fraction(timeline.bubble).limit_denominator(10_000) == expected, (p, m, v)
            compared_sizes += 1
            if name == "zbv":
                assert timeline.inner_bubble == 0
    assert compared_sizes >= 3


def test_activations_in_flight() -> None:
    def counts(name: str, v: int = 0) -> list[int]:
        timeline = simulate(action_lists(name, 4, 8, v))
        return [timeline.in_flight(rank) for rank in range(4)]

    assert counts("gpipe") == [8, 8, 8, 8]
    assert counts("1f1b") == [4, 3, 2, 1]
    assert counts("zero_bubble") == [4, 4, 4, 4]
    assert counts("zbv") == [8, 8, 8, 8]  # of stages half as large
    assert counts("dualpipev") == [9, 9, 9, 9]


class Noting(PipelineStage):
    """A stage of torch that notes what it is asked to do."""

    noted: list[tuple[int, int, str, int]]

    def forward_one_chunk(self, index: int, *args: Any, **kwargs: Any) -> Any:
        self.noted.append((self.group_rank, self.stage_index, "F", index))
        return super().forward_one_chunk(index, *args, **kwargs)

    def backward_one_chunk(self, index: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
        self.noted.append((self.group_rank, self.stage_index, "B" if full_backward else "I", index))
        return super().backward_one_chunk(index, *args, full_backward=full_backward, **kwargs)

    def backward_weight_one_chunk(self, index: int, *args: Any, **kwargs: Any) -> Any:
        self.noted.append((self.group_rank, self.stage_index, "W", index))
        return super().backward_weight_one_chunk(index, *args, **kwargs)


def executed(names: list[str], micro_batches: int) -> dict[str, list[tuple[int, int, str, int]]]:
    """What this rank's stages do in a step of each schedule, on real tensors."""
    accelerator = Accelerator(cpu=True)
    rank, ranks = accelerator.process_index, accelerator.num_processes
    found = {}
    for name in names:
        schedule, stages = checked(name, ranks, micro_batches)
        count = ranks * stages
        own = [rank + ranks * place for place in range(stages)]
        if name in ("zbv", "dualpipev"):
            own = [rank, count - 1 - rank]
        noted: list[tuple[int, int, str, int]] = []
        parts = [Noting(nn.Linear(4, 4), index, count, torch.device("cpu")) for index in own]
        for part in parts:
            part.noted = noted
        kind: Any = schedules.get_schedule_class(RULES[schedule].torch_name)
        pipeline = kind(
            parts[0] if issubclass(kind, schedules.PipelineScheduleSingle) else parts,
            micro_batches,
            loss_fn=nn.functional.mse_loss,
        )
        batch = torch.randn(micro_batches, 4, requires_grad=True)
        pipeline.step(*([batch] if 0 in own else []), target=torch.zeros(micro_batches, 4))
        found[name] = noted
    return found


def test_processes_do_what_the_lists_say(run_distributed) -> None:
    names = Schedule.list()
    by_process = run_distributed(executed, 2, names, 6, timeout_s=150)
    for name in names:
        run = by_rank(record for found in by_process for record in found[name])
        lists = action_lists(name, 2, 6)
        assert run == [[action._replace(paired=False) for action in order] for order in lists], name
        if name != "dualpipev":  # whose pairs a record does not show
            assert simulate(run).bubble == float(promised(name, 2, 6, checked(name, 2, 6)[1]) or -1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1", 4, 8), "Did you mean '1f1b'"),
        (("1f1b", 4, 3), "3 micro-batches and 4 stages"),
        (("dualpipev", 4, 7), "Use 8 micro-batches"),
        (("interleaved", 4, 9), "Use 8 or 12 micro-batches"),
        (("zero_bubble", 2, 5), "Use 4 or 6 micro-batches"),
        (("1f1b", 4, 8, 2), "or use interleaved"),
        (("zbv", 4, 8, 3), "zbv has exactly 2 stage"),
        (("gpipe", 65, 1), "at most 64 ranks"),
        (("interleaved", 4, 1000, 9), "10,000 for the product"),
    ],
)
def test_what_a_schedule_cannot_do_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    expect_refusal(ConfigError, message, action_lists, *arguments)


def test_a_comparison_says_why_a_schedule_is_missing() -> None:
    cases = {case.schedule: case for case in compared(4, 7, Times())}
    assert list(cases) == list(Schedule)
    assert "8 stages" in cases[Schedule.DUALPIPEV].reason
    assert cases[Schedule.ZBV].timeline is not None
    expect_refusal(ConfigError, "64", compared, 100, 7, Times())
