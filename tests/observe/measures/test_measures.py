"""What is measured of a run, against what the script itself knows."""

from __future__ import annotations

import gc
import json
import resource
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import Accelerator
from lockstep.errors import UsageError
from lockstep.observe.measures import tokens_in
from tests.observe.measures.loops import train_on


class LoopValues:
    """What a training loop knows of itself."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []


def data(rows: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.arange(7), "x": torch.randn(4, generator=generator)} for _ in range(rows)]


def train(
    accelerator: Accelerator, rows: int, accumulation: int = 1, load: str = "", save: str = ""
) -> LoopValues:
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(4, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    loader: Any = torch.utils.data.DataLoader(data(rows), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if load:
        accelerator.load_state(load)
    expected = LoopValues()
    losses: list[float] = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch["x"]).square().mean()
            accelerator.backward(loss)
            losses.append(loss.item())
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            expected.losses.append(sum(losses) / len(losses))
            expected.norms.append(float(norm))
            expected.rates.append(scheduler.get_last_lr()[0])
            losses = []
    if save:
        accelerator.save_state(save)
    return expected


@pytest.mark.parametrize("accumulation", [1, 3])
def test_measures_are_what_the_loop_knows(accumulation: int) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    expected = train(accelerator, 24, accumulation)
    accelerator.end_training()
    steps = list(accelerator.measures.recent)
    assert [step.loss for step in steps] == pytest.approx(expected.losses)
    assert [step.gradient_norm for step in steps] == pytest.approx(expected.norms)
    assert [step.learning_rate for step in steps] == [[rate] for rate in expected.rates]
    assert [step.samples for step in steps] == [2 * accumulation] * len(steps)
    assert [step.tokens for step in steps] == [14 * accumulation] * len(steps)
    seconds = sum(step.seconds["total"] for step in steps if step.seconds is not None)
    assert accelerator.measures.samples_per_second == pytest.approx(24 / seconds)
    assert accelerator.measures.tokens_per_second == pytest.approx(24 * 7 / seconds)


def test_a_script_says_how_many_tokens_it_trains_on() -> None:
    accelerator = Accelerator()
    count = accelerator.measures.count_tokens
    loader: Any = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)  # type: ignore[arg-type]
    train_on(accelerator, torch.nn.Linear(4, 1), loader, lambda number: number == 2 or count(10 + number))
    assert [step.tokens for step in accelerator.measures.recent] == [10, 11, None, 13]


def test_tokens_are_found_in_batches_of_many_shapes() -> None:
    ids = torch.zeros(2, 5, dtype=torch.long)

    class Batch:
        input_ids = ids

    assert tokens_in({"input_ids": ids, "labels": ids}) == 10
    assert tokens_in(({"tokens": ids}, ids)) == 10
    assert tokens_in(Batch()) == 10
    assert tokens_in(ids) is None
    assert tokens_in({"input_ids": [[1, 2]]}) is None
    assert tokens_in({"x": ids}) is None


def test_the_number_of_steps_is_a_number() -> None:
    accelerator = Accelerator()
    accelerator.measures.step = 7
    assert accelerator.measures.step == 7
    with pytest.raises(UsageError):
        accelerator.measures.step = -1


def test_trackers_get_measures_only_where_that_is_asked_for(tmp_path: Path) -> None:
    def logged(**options: Any) -> set[str]:
        folder = tmp_path / str(len(options))
        accelerator = Accelerator(log_with="jsonl", project_dir=folder, run_dir="no", **options)
        accelerator.init_trackers("digits")
        train(accelerator, 8)
        accelerator.log({"loss": 1.0}, step=4)
        accelerator.end_training()
        assert not (folder / "run").exists()
        lines = [
            json.loads(line) for path in folder.rglob("*.jsonl") for line in path.read_text().splitlines()
        ]
        return {name for line in lines for name in (line.get("values") or line)}

    assert not any(name.startswith("lockstep/") for name in logged())
    assert {"loss", "lockstep/samples_per_second", "lockstep/seconds/forward"} <= logged(log_measures=True)


def test_no_accelerator_is_kept_alive_by_its_measures() -> None:
    gc.collect()
    accelerator = Accelerator()
    clock = accelerator.gradient_state.clock
    before = len(clock.at_step)
    train(accelerator, 4)
    assert len(clock.at_step) == before + 1
    gone = weakref.ref(accelerator.measures)
    del accelerator
    gc.collect()
    assert gone() is None
    assert len(clock.at_step) == before


def test_the_peak_is_that_of_the_process() -> None:
    accelerator = Accelerator()
    train_on(accelerator, torch.nn.Linear(100, 100, bias=False), 4 * [torch.randn(2, 100)])
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert 0.9 * most <= accelerator.measures.memory["peak"] <= most
    memories = [step.memory for step in accelerator.measures.recent]
    assert memories == [accelerator.measures.memory, None, None, None]
