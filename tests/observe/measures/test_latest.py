"""What a line of progress is told of a run, beside what the script knows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator
from lockstep.errors import UsageError
from lockstep.observe.hang import json_numbers, numbers_of
from lockstep.observe.measures import StepMeasures, latest_numbers


def step(number: int, seconds: float, **values: Any) -> StepMeasures:
    return StepMeasures(number, 0.0, seconds={"total": seconds}, **values)


def test_rates_are_those_of_the_steps_of_which_the_amount_is_known() -> None:
    recent = [
        step(1, 1.0, samples=8, loss=3.0),
        step(2, 3.0, samples=8, tokens=600, flops={"model": 3e9}, loss=2.0, epoch=4),
    ]
    assert latest_numbers(recent, 4e9, 10, None, 1) == {
        "step": 2, "loss": 2.0, "epoch": 4, "step_seconds": 2.0, "samples_per_second": 4.0,
        "tokens_per_second": 200.0, "model_flops_per_second": 1e9, "mfu": 0.25, "total_steps": 10,
    }  # fmt: skip
    assert latest_numbers([], 4e9, 10, None, 1) == {}
    assert latest_numbers([StepMeasures(7, 0.0)], None, None, None, 1) == {"step": 7, "step_seconds": 0.0}


def test_rates_are_those_of_the_newest_steps() -> None:
    recent = [step(number, 100.0 if number <= 34 else 2.0, samples=8) for number in range(1, 51)]
    numbers = latest_numbers(recent, None, None, None, 1)
    assert (numbers["step_seconds"], numbers["samples_per_second"]) == (2.0, 4.0)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_what_is_left_of_the_epoch_is_counted_in_steps(accumulation: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model: Any = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    loader: Any = DataLoader(TensorDataset(torch.ones(14, 1)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.measures.total_steps = 20
    lines = []
    for epoch in range(2):
        steps = math.ceil(7 / accumulation)
        for (batch,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                steps -= 1
                assert accelerator.measures.recent or not lines  # another thread may be told a moment later
                numbers = accelerator.measures.for_people()
                # of the step that is under way, and the latest complete one
                lines.append((numbers.get("step", 0) + 1, numbers.get("epoch_steps_left", steps)))
                assert lines[-1] == (len(lines), steps), epoch
                assert len(lines) == 1 or "epoch_steps_left" in numbers
                assert numbers.get("total_steps", 20) == 20
    assert len(lines) == 2 * math.ceil(7 / accumulation)
    accelerator.end_training()


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, "10"])
def test_a_total_that_is_no_number_of_steps_is_refused(steps: Any) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UsageError):
        accelerator.measures.total_steps = steps
    assert accelerator.measures.total_steps is None


def test_numbers_travel_as_json_has_them_and_hostile_ones_do_not() -> None:
    sent = json_numbers({"loss": math.nan, "mfu": math.inf, "step": 3})
    assert sent == {"loss": "nan", "mfu": "inf", "step": 3}
    assert numbers_of({**sent, "a": "b", "c": True, "d": [1], "e": 1e308, "f": 10**400}) == sent
    assert numbers_of([1]) == numbers_of(None) == numbers_of({str(i): i for i in range(1000)}) == {}
