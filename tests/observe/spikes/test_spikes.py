"""Planted spikes: every rank leaves the same steps out, and nothing of them is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import Accelerator, DamageChecks, SpikeError, SpikePolicy
from lockstep.comm import CommCounter
from lockstep.errors import ConfigError, UsageError
from tests.observe.spikes.problem import (
    PLANTED,
    ROWS,
    STEPS,
    Cell,
    Run,
    batches,
    check_cell,
    differences,
    events_of,
    loss_of,
    plainly,
    run_cells,
)
from tests.refusals import expect_refusal

POLICY = SpikePolicy(window=16, warmup=8, gradient_norm_threshold=40.0, loss_threshold=40.0)

ALONE = [
    Cell(),
    Cell(accumulation=3),
    Cell(fp16=True, clips=True),
    Cell(fp16=True, accumulation=2),
]
BY_TWO = [
    Cell(data=2, accumulation=2, clips=True),
    Cell(data=2, fp16=True),
    Cell("zero=2", data=2, accumulation=2),
    Cell("zero=3", data=2, clips=True),
    Cell("tp=2", clips=True),
    Cell("pp=2", accumulation=2, fp16=True),
]


@pytest.mark.parametrize(("world_size", "cells"), [(1, ALONE), (2, BY_TWO)], ids=["1 rank", "2 ranks"])
def test_a_skipped_step_leaves_no_trace(run_distributed: Any, world_size: int, cells: list[Cell]) -> None:
    """50 planted spikes, on 1 and 2 ranks."""
    torch.set_num_threads(1)
    kept = [step for step in range(STEPS) if step not in PLANTED]
    ranks = run_distributed(run_cells, world_size, cells, POLICY, kept, timeout_s=120)
    for number, cell in enumerate(cells):
        expected = plainly(cell, PLANTED)
        of_ranks = [rank[number] for rank in ranks]
        assert {name for found in of_ranks for name in found["watched"]} >= expected.keys()
        check_cell(cell, of_ranks, len(PLANTED))
        for found in of_ranks:
            if cell.parallel == "ddp" and not cell.fp16:
                assert differences(expected, found["watched"]) == [], str(cell)
            elif not cell.fp16:
                here = expected.keys() & found["watched"].keys()  # of a pipeline, its blocks
                far = [n for n in here if not torch.allclose(expected[n], found["watched"][n], 1e-4, 1e-6)]
                assert far == [], str(cell)


def stopped(kind: str, folder: Path | None = None) -> tuple[str, int, bool]:
    cell = Cell(data=2)
    policy = SpikePolicy("stop", window=16, warmup=8)
    run = Run(cell, policy, batches(cell, {10: kind}), run_dir=folder)
    steps, before = 0, run.state()
    try:
        for _ in run:
            steps, before = steps + 1, run.state()
    except SpikeError as error:
        return str(error), steps, differences(before, run.state()) == []
    return "", steps, False


@pytest.mark.parametrize(("kind", "begins"), [("rows", "The "), ("nan", "The loss is NaN in step 11. ")])
def test_all_ranks_stop_before_the_step(run_distributed: Any, tmp_path: Path, kind: str, begins: str) -> None:
    ranks = run_distributed(stopped, 2, kind, tmp_path)
    assert ranks[0] == ranks[1]
    sentence, steps, is_untouched = ranks[0]
    assert sentence.startswith(begins)
    assert " in step 11. No rank made this step" in sentence
    assert (steps, is_untouched) == (10, True)
    (event,) = events_of(tmp_path)
    assert (event["action"], event["step"], event.get("skipped")) == ("stop", 11, None)


def collectives() -> tuple[int, int]:
    counts = []
    for policy in (None, POLICY):
        cell = Cell(data=2)
        run = Run(cell, policy, batches(cell, {}))
        with CommCounter() as counter:
            run.train()
        counts.append(counter.count())
        run.accelerator.free_memory()
    return counts[0], counts[1]


def test_one_collective_a_step_where_there_is_a_policy(run_distributed: Any) -> None:
    for without, watched in run_distributed(collectives, 2):
        assert watched - without == STEPS


def test_events_tell_of_each_spike(tmp_path: Path) -> None:
    cell = Cell(accumulation=2)
    Run(cell, POLICY, batches(cell, PLANTED), run_dir=tmp_path).train()
    events = events_of(tmp_path)
    assert [event["step"] for event in events] == [step + 1 for step in PLANTED]
    assert [event["skipped"] for event in events] == [[2 * step + 1, 2 * step + 2] for step in PLANTED]
    assert {event["action"] for event in events} == {"skip"}
    assert {event["samples"] for event in events} == {2 * ROWS}
    assert [event["kind"] for event in events][1:] == ["loss", "gradient_norm", "loss", "loss"]
    assert events[3]["score"] == float("inf")


@pytest.mark.parametrize("saved_after", [18, 25], ids=["between steps", "inside of a window"])
def test_a_resumed_run_decides_as_one_that_was_not_interrupted(tmp_path: Path, saved_after: int) -> None:
    cell = Cell(accumulation=2)
    data = batches(cell, PLANTED)
    run = Run(cell, POLICY, data)
    for behind in run:
        if behind == saved_after:
            run.accelerator.save_state(tmp_path / "checkpoint")
    resumed = Run(cell, POLICY, data)
    resumed.accelerator.load_state(tmp_path / "checkpoint")
    resumed.train()
    assert run.skipped == list(PLANTED)
    assert differences(run.state(), resumed.state()) == []
    assert run.spikes.state_dict() == resumed.spikes.state_dict()


def test_a_run_that_does_not_recover_stops() -> None:
    cell = Cell()
    policy = SpikePolicy(window=16, warmup=8, max_skips=3)
    run = Run(cell, policy, batches(cell, dict.fromkeys(range(10, STEPS), "loss")))
    with pytest.raises(SpikeError, match="step 14.*3 steps"):
        run.train()
    assert run.skipped == [10, 11, 12]


def test_gradients_that_overflow_are_the_loss_scalers() -> None:
    cell = Cell(fp16=True)
    run = Run(cell, POLICY, batches(cell, {10: "gradient"}), scale=2.0**12)
    run.train()
    assert run.skipped == [10]
    assert run.spikes.steps_skipped == 0
    assert len(run.spikes.state_dict()["loss"]) == 16
    assert run.accelerator.scaler is not None
    # Two times four steps, the half, and three times four steps.
    assert run.accelerator.scaler.get_scale() == 2.0**16


def test_an_open_window_is_shared_by_other_ranks() -> None:
    cell = Cell()
    run = Run(cell, POLICY, batches(cell, {}))
    spikes = run.spikes
    empty = spikes.state_dict()
    saved = [{**empty, "batches": 7, "first_batch": 7, "open": [total, 1.0]} for total in (3.0, 5.0)]
    spikes.load_state_dicts([*saved], None)
    assert spikes.state_dict() == {**saved[0], "open": [4.0, 1.0]}
    spikes.load_state_dicts([*saved], 1)
    assert spikes.state_dict() == saved[1]
    spikes.load_state_dicts([None, None], None)
    assert spikes.state_dict() == empty


def test_losses_of_cleared_gradients_are_of_no_step() -> None:
    cell = Cell()
    run = Run(cell, POLICY, batches(cell, {}))
    run.train()
    batch = batches(cell, {0: "nan"})[0]
    run.accelerator.backward(loss_of(run.model, batch))
    run.optimizer.zero_grad()
    run.accelerator.backward(loss_of(run.model, batches(cell, {})[0]))
    run.optimizer.step()
    assert not run.accelerator.optimizer_step_was_skipped


def test_weighted_losses_are_the_mean_over_the_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[POLICY])
    weight = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(weight, torch.optim.SGD(weight.parameters(), lr=0.0))
    expected = []
    for losses, weights in (([1.0, 2.0, 3.0], [1.0, 1.0, 0.0]), ([5.0], [4.0])):
        with accelerator.accumulate(model):
            values = torch.tensor(losses) + 0 * model(torch.ones(len(losses), 1)).flatten()
            accelerator.backward(values, weight=torch.tensor(weights))
            optimizer.step()
        expected += [(v, w) for v, w in zip(losses, weights, strict=True)]
    assert accelerator.spikes is not None
    (loss,) = accelerator.spikes.state_dict()["loss"]
    assert loss == pytest.approx(sum(v * w for v, w in expected) / sum(w for _, w in expected))


def not_together() -> str:
    cell = Cell(data=2)
    run = Run(cell, POLICY, batches(cell, {}))
    try:
        with run.accelerator.alone(run.model):
            run.train()
    except UsageError as error:
        return str(error)
    return ""


def test_ranks_that_step_apart_are_refused(run_distributed: Any) -> None:
    for message in run_distributed(not_together, 2):
        assert message.startswith(
            "SpikePolicy decides for all 2 ranks alike, but in this run they take separate steps"
        )


def test_what_cannot_be_watched_is_refused() -> None:
    with pytest.raises(ConfigError, match="DamageChecks"):
        Accelerator(cpu=True, kwargs_handlers=[SpikePolicy(), DamageChecks(bad_gradients="skip")])
    accelerator = Accelerator(cpu=True, kwargs_handlers=[SpikePolicy()])
    layers = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    with pytest.raises(UsageError, match="one optimizer"):
        accelerator.prepare(*layers, *(torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[SpikePolicy()])
    _, optimizer = accelerator.prepare(layers[0], torch.optim.SGD(layers[0].parameters(), lr=0.1))
    expect_refusal(UsageError, "closure", optimizer.step, lambda: 0.0)
