"""What is kept of a bad step: the batches, generators and weights with which it was made, and no more of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import Accelerator, ProjectConfiguration, SpikePolicy
from lockstep.checkpoint.format import CapsuleFacts, RankCapsule
from lockstep.errors import ConfigError
from tests.observe.spikes.problem import PLANTED, ROWS, Cell, Run, batches, events_of, make_model
from tests.refusals import expect_refusal

POLICY = SpikePolicy(window=16, warmup=8, gradient_norm_threshold=40.0, loss_threshold=40.0)


def test_the_latest_capsules_stay(tmp_path: Path) -> None:
    cell = Cell(accumulation=2)
    data = batches(cell, PLANTED)
    Run(cell, POLICY, data, run_dir=tmp_path).train()
    events = events_of(tmp_path)
    names = [f"step-{step + 1:06d}" for step in PLANTED]
    assert [event["capsule"] for event in events] == [str(tmp_path / "capsules" / name) for name in names]
    assert sorted(path.name for path in (tmp_path / "capsules").iterdir()) == names[-3:]
    for step in list(PLANTED)[-3:]:
        folder = tmp_path / "capsules" / f"step-{step + 1:06d}"
        facts, kept = CapsuleFacts.read(folder), RankCapsule.read(folder, 0)
        assert (facts.step, facts.samples, facts.accumulation_steps) == (step + 1, 2 * ROWS, 2)
        assert facts.history.keys() == {"loss", "gradient_norm"}
        for number, each in enumerate(kept.batches):
            assert all(map(torch.equal, each.batch, data[2 * step + number]))
        assert kept.inexact == ""
        assert not [path for path in folder.rglob("*") if path.suffix not in (".json", ".safetensors", "")]


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Run(Cell(), POLICY, batches(Cell(), PLANTED)).train()
    none = SpikePolicy(window=16, warmup=8, capsules=0)
    Run(Cell(), none, batches(Cell(), PLANTED), run_dir=tmp_path / "run").train()
    assert not list(tmp_path.rglob("capsule*"))


def weights_before(cell: Cell, folder: Path) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    policy = SpikePolicy("stop", window=16, warmup=8)
    run = Run(cell, policy, batches(cell, {10: "nan"}), run_dir=folder / str(cell.parallel))
    before = run.state()
    try:
        for _ in run:
            before = run.state()
    except RuntimeError:
        pass
    run.accelerator.free_memory()
    return {name: value for name, value in before.items() if isinstance(value, torch.Tensor)}


def test_weights_are_those_before_the_step(run_distributed: Any, tmp_path: Path) -> None:
    for cell in (Cell(data=2), Cell("zero=3", data=2), Cell("tp=2"), Cell("pp=2")):
        of_ranks = run_distributed(weights_before, 2, cell, tmp_path)
        folder = tmp_path / cell.parallel / "capsules" / "step-000011"
        facts = CapsuleFacts.read(folder)
        assert facts.data_ranks == ((0, 1) if cell.data == 2 else (0, 0))
        batch = [RankCapsule.read(folder, rank).batches[0].batch for rank in (0, 1)]
        assert torch.equal(batch[0][0], batch[1][0]) == (cell.data == 1)
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(make_model())
        accelerator.load_state(folder / "weights")
        loaded = dict(accelerator.unwrap_model(model).named_parameters())
        assert loaded.keys() == {name for found in of_ranks for name in found}
        assert all(torch.equal(loaded[name], value) for found in of_ranks for name, value in found.items())


def test_batches_that_are_changed_in_place_are_kept_as_they_were(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, run_dir=tmp_path, kwargs_handlers=[SpikePolicy()])
    model = torch.nn.Linear(1, 1)
    loader = torch.utils.data.DataLoader([{"x": torch.ones(1), "name": str(i)} for i in range(4)])
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for number, batch in enumerate(loader):
        batch.pop("name")
        x = batch["x"].mul_(2)
        accelerator.backward(model(x).sum() * (float("nan") if number in (0, 2) else 1.0))
        optimizer.step()
        optimizer.zero_grad()
    kept = RankCapsule.read(tmp_path / "capsules" / "step-000001", 0)
    assert (kept.inexact, kept.batches[0].batch["x"].tolist()) == ("", [[1.0]])
    assert kept.batches[0].batch["name"] == ["0"]


def test_batches_of_evaluations_are_not_kept(tmp_path: Path) -> None:
    cell = Cell()
    run = Run(cell, POLICY, batches(cell, {10: "nan"}), run_dir=tmp_path)
    held_out = run.accelerator.prepare(torch.utils.data.DataLoader(torch.zeros(6, 1), 2))
    for _ in run:
        run.model.eval()
        for _ in held_out:
            pass
        run.model.train()
    kept = RankCapsule.read(tmp_path / "capsules" / "step-000011", 0)
    assert [len(each.batch) for each in kept.batches] == [3]


class Strange:
    """No file holds it."""


def strange_batches(folder: Path) -> tuple[int, int]:
    accelerator = Accelerator(cpu=True, run_dir=folder, kwargs_handlers=[SpikePolicy()])
    model = torch.nn.Linear(1, 1)
    loader = torch.utils.data.DataLoader([(torch.ones(1), Strange()) for _ in range(6)], collate_fn=list)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for number, [(x, _)] in enumerate(loader):
        accelerator.backward(model(x).sum() * (float("nan") if number == 1 else 1.0))
        optimizer.step()
        optimizer.zero_grad()
    assert accelerator.spikes is not None
    return accelerator.spikes.steps, accelerator.spikes.steps_skipped


def test_a_capsule_that_cannot_be_written_ends_nothing(run_distributed: Any, tmp_path: Path) -> None:
    assert run_distributed(strange_batches, 2, tmp_path) == [(3, 1), (3, 1)]
    (event,) = events_of(tmp_path)
    assert "capsule" not in event
    assert not list((tmp_path / "capsules").glob("step-*"))


def test_the_newest_checkpoint_is_named(tmp_path: Path) -> None:
    cell = Cell()
    policy = SpikePolicy(window=16, warmup=8, capsule_weights=False)
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    run = Run(cell, policy, batches(cell, {10: "nan"}), project_config=project)
    for behind in run:
        if behind in (3, 7):
            run.accelerator.save_state()
    folder = tmp_path / "run" / "capsules" / "step-000011"
    facts = CapsuleFacts.read(folder)
    assert (Path(facts.checkpoint).name, facts.steps_since) == ("checkpoint_1", 3)
    assert not (folder / "weights").exists()


def test_what_is_no_capsule_is_refused(tmp_path: Path) -> None:
    expect_refusal(ConfigError, "no capsule", CapsuleFacts.read, tmp_path)
    (tmp_path / "capsule.json").write_text(json.dumps({"format": "lockstep capsule 99"}))
    expect_refusal(ConfigError, "another version", CapsuleFacts.read, tmp_path)
    expect_refusal(ConfigError, "rank 0", RankCapsule.read, tmp_path, 0)
    expect_refusal(ConfigError, "-1", SpikePolicy, capsules=-1)
