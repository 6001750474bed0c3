"""Going back to the newest checkpoint at planted spikes: nothing is left of what was trained on since then."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import Accelerator, SpikeError, SpikePolicy, set_seed
from lockstep.errors import CheckpointError, ConfigError
from lockstep.history import EVENTS, MEASURES, read_lines
from tests.observe.spikes.problem import (
    PLANTED,
    ROWS,
    SAVE_EVERY,
    STEPS,
    Cell,
    Run,
    batches,
    check_cell,
    differences,
    events_of,
    only,
    run_cells,
)
from tests.observe.spikes.test_spikes import ALONE, BY_TWO
from tests.refusals import expect_refusal

POLICY = SpikePolicy("rollback", window=16, warmup=8, gradient_norm_threshold=40.0, loss_threshold=40.0)


def trained_on(skip_steps: int = 0) -> list[int]:
    """The steps that count in the end; so many further ones are left out behind each spike."""
    trained: list[int] = []
    saved: list[int] = []
    seen, step = 0, 0
    while step < STEPS:
        seen += 1
        if step in PLANTED:
            trained = list(saved)
            step += skip_steps
        else:
            trained.append(step)
        if seen % SAVE_EVERY == 0:
            saved = list(trained)
        step += 1
    return trained


@pytest.mark.parametrize(("world_size", "cells"), [(1, ALONE), (2, BY_TWO)], ids=["1 rank", "2 ranks"])
def test_what_was_trained_on_since_the_checkpoint_leaves_no_trace(
    run_distributed: Any, tmp_path: Path, world_size: int, cells: list[Cell]
) -> None:
    """50 planted spikes, on 1 and 2 ranks."""
    lost = STEPS - len(trained_on())
    assert lost > len(PLANTED)
    ranks = run_distributed(run_cells, world_size, cells, POLICY, trained_on(), tmp_path, timeout_s=200)
    for number, cell in enumerate(cells):
        check_cell(cell, [rank[number] for rank in ranks], lost)


def test_further_batches_are_left_out_and_counted(tmp_path: Path) -> None:
    cell = Cell(accumulation=2)
    policy = SpikePolicy("rollback", 40.0, 40.0, window=16, warmup=8, skip_batches=4)
    run = Run(cell, policy, batches(cell, PLANTED), run_dir=tmp_path / "run")
    run.train_saving(tmp_path)
    kept = trained_on(skip_steps=2)
    without = Run(cell, None, only(cell, kept))
    without.train()
    assert differences(run.state(), without.state()) == []
    spikes = run.spikes
    assert (spikes.batches, spikes.samples) == (2 * STEPS, 2 * STEPS * ROWS)
    lost = 2 * (STEPS - len(kept))
    assert (spikes.batches_skipped, spikes.samples_skipped) == (lost, lost * ROWS)
    events = events_of(tmp_path / "run")
    assert {event["action"] for event in events} == {"rollback"}
    left = [number for event in events for number in event["skipped"]]
    assert len(set(left)) == len(left) == lost
    assert sum(event["samples"] for event in events) == lost * ROWS
    assert all(Path(event["checkpoint"]).exists() for event in events)
    assert all(Path(event["capsule"]).parent.name == "capsules" for event in events)


class Seen:
    """How many steps were made: what a script keeps for itself, and registers."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def dropping_out(rows: torch.Tensor, policy: SpikePolicy | None, folder: Path) -> tuple[Any, ...]:
    set_seed(0)
    accelerator = Accelerator(cpu=True, run_dir=folder / "run", kwargs_handlers=[policy] if policy else [])
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(rows.flatten(0, 1), batch_size=len(rows[0]))
    seen = Seen()
    accelerator.register_for_checkpointing(seen)
    return accelerator, *accelerator.prepare(model, optimizer, loader), seen


def test_generators_and_registered_objects_go_back_too(tmp_path: Path) -> None:
    rows = torch.randn(12, 6, 4)
    spoilt = rows.clone()
    spoilt[7, 2] = float("nan")
    accelerator, model, optimizer, loader, seen = dropping_out(spoilt, SpikePolicy("rollback"), tmp_path)

    def train(loader: Any, model: Any, optimizer: Any, seen: Seen, accelerator: Any) -> dict[str, Any]:
        for number, batch in enumerate(loader):
            if accelerator.spikes is not None and number == 4:
                accelerator.save_state(tmp_path / "checkpoint")
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            seen.steps += not accelerator.optimizer_step_was_skipped
        return {"seen": torch.tensor(seen.steps), "next": torch.rand(4), **model.state_dict()}

    watched = train(loader, model, optimizer, seen, accelerator)
    accelerator.end_training()
    cut = torch.cat([rows[:5], rows[8:], rows[:3]])  # as long as it was
    accelerator, model, optimizer, loader, seen = dropping_out(cut, None, tmp_path / "other")
    accelerator.load_state(tmp_path / "checkpoint")
    # The state that was saved behind the fifth batch, and before its step: that batch is not seen again.
    without = train(islice(loader, 4), model, optimizer, seen, accelerator)
    assert int(watched["seen"]) == 8
    assert differences(watched, without) == []
    events = list(read_lines(tmp_path / "run" / EVENTS))
    (back,) = [event for event in events if event["event"] == "loaded"]
    assert (back["rollback"], back["step"]) == (True, 4)
    steps = [line["step"] for line in read_lines(tmp_path / "run" / MEASURES)]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8]


def test_there_must_be_a_checkpoint() -> None:
    cell = Cell()
    run = Run(cell, POLICY, batches(cell, {10: "nan"}))
    expect_refusal(SpikeError, "go back", run.train)


def flip(folder: Path) -> None:
    path = next(folder.glob("model-*"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit is another": flip,
    "removed": shutil.rmtree,
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
}


def with_damaged(cell: Cell, folder: Path) -> list[list[str]]:
    """Per kind of damage to the two newest of three checkpoints: what differs from a run that never had them."""
    torch.set_num_threads(1)
    found = []
    for kind, damage in DAMAGE.items():
        run = Run(cell, POLICY, batches(cell, {10: "nan"}))
        main = run.accelerator.is_main_process
        saves = {3: "first", 5: "second", 8: "third"}
        for behind in run:
            name = saves.get(behind // cell.accumulation) if behind % cell.accumulation == 0 else None
            if name is not None:
                run.accelerator.save_state(folder / kind / name)
                if name != "first" and main:
                    damage(folder / kind / name)
                run.accelerator.wait_for_everyone()
        kept = [step for step in range(STEPS) if not 3 <= step <= 10]
        without = Run(cell, None, only(cell, kept, {}))
        without.train()
        assert run.skipped == [10]
        found.append(differences(run.state(), without.state()))
    return found


@pytest.mark.parametrize(
    ("world_size", "cell"),
    [(1, Cell(accumulation=2)), (2, Cell("zero=3", data=2))],
)
def test_of_damaged_checkpoints_the_newest_whole_one_is_gone_back_to(
    run_distributed: Any, tmp_path: Path, world_size: int, cell: Cell
) -> None:
    assert run_distributed(with_damaged, world_size, cell, tmp_path) == [[[]] * len(DAMAGE)] * world_size


def test_without_a_whole_checkpoint_the_newest_one_is_named(tmp_path: Path) -> None:
    cell = Cell()
    run = Run(cell, POLICY, batches(cell, {10: "nan"}))
    for name in ("first", "second"):
        run.accelerator.save_state(tmp_path / name)
        flip(tmp_path / name)
    expect_refusal(CheckpointError, "is damaged", run.train)


def test_a_run_that_does_not_recover_stops(tmp_path: Path) -> None:
    cell = Cell()
    policy = SpikePolicy("rollback", window=16, warmup=8, max_skips=2)
    run = Run(cell, policy, batches(cell, dict.fromkeys(range(10, STEPS), "nan")))
    run.accelerator.save_state(tmp_path / "checkpoint")
    with pytest.raises(SpikeError, match="step 13.*2 times"):
        run.train()


def test_left_out_batches_end_with_the_epoch(tmp_path: Path) -> None:
    cell = Cell()
    policy = SpikePolicy("rollback", window=16, warmup=8, skip_batches=100)
    run = Run(cell, policy, batches(cell, {20: "nan"}))
    run.accelerator.save_state(tmp_path / "checkpoint")
    assert run.train() == [20]
    spikes = run.spikes
    assert (spikes.batches, spikes.batches_skipped) == (STEPS, STEPS)
    before = run.state()
    run.train()
    assert run.skipped == [20, 20]
    assert differences(before, run.state()) == []


def test_further_batches_are_of_a_rollback_alone() -> None:
    expect_refusal(ConfigError, "skip_batches is 4", SpikePolicy, skip_batches=4)
