"""Saved states: a run that continues from one is the run that was not interrupted."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from checkpoint import saved_files
from lockstep import Accelerator, GradScalerKwargs, ProjectConfiguration
from lockstep.checkpoint.format import decode, encode
from lockstep.errors import CheckpointError, LockstepError, UsageError
from tests.refusals import expect_refusal
from train import problems

STEPS_AN_EPOCH = 5


class Average:
    """An object of the user's with a state."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])


class Run:
    """A run with everything that has a state, dropout and random noise included."""

    def __init__(self, precision: str, seed: int, scheduler: str = "cosine") -> None:
        torch.manual_seed(seed)
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision=precision,
            kwargs_handlers=[GradScalerKwargs(init_scale=256.0, growth_interval=3)],
        )
        model = nn.Sequential(
            nn.Linear(problems.FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, problems.CLASSES)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule: Any = (
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
            if scheduler == "cosine"
            else lr_scheduler.MultiStepLR(optimizer, [3, 9, 15])
        )
        dataset = TensorDataset(
            *problems.make_rows(0, 0, 4 * STEPS_AN_EPOCH * self.accelerator.num_processes)
        )
        loader = DataLoader(dataset, batch_size=4, shuffle=True)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, loader, schedule
        )
        self.average = Average()
        self.accelerator.register_for_checkpointing(self.average)

    def train(self, steps: int, save_to: str | None = None) -> list[float]:
        """Losses of the next ``steps`` steps, across the ends of epochs."""
        losses: list[float] = []
        while len(losses) < steps:
            for rows, labels in self.loader:
                noise = random.random() + np.random.rand()
                loss = F.cross_entropy(self.model(rows * (1 + 0.01 * noise)), labels)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                losses.append(loss.item())
                self.average.values.append(self.accelerator.reduce(loss.detach(), "mean").item())
                if len(losses) == steps:
                    if save_to is not None:  # inside the loop, where the loader knows its position
                        self.accelerator.save_state(save_to)
                    break
        return losses


def interrupted(directory: str, precision: str, before: int, scheduler: str) -> dict[str, Any]:
    first = Run(precision, seed=1, scheduler=scheduler)
    first.train(before, save_to=directory)
    other = Run(precision, seed=2, scheduler=scheduler)
    other.train(2)
    other.accelerator.load_state(directory)
    losses = other.train(7)
    return {
        "losses": losses,
        "parameters": problems.parameters(other.accelerator.unwrap_model(other.model)),
        "rate": other.schedule.get_last_lr(),
        "average": other.average.values,
        "scale": other.accelerator.scaler.get_scale() if other.accelerator.scaler else None,
    }


def uninterrupted(precision: str, before: int, scheduler: str) -> dict[str, Any]:
    run = Run(precision, seed=1, scheduler=scheduler)
    losses = run.train(before + 7)
    return {
        "losses": losses[before:],
        "parameters": problems.parameters(run.accelerator.unwrap_model(run.model)),
        "rate": run.schedule.get_last_lr(),
        "average": run.average.values,
        "scale": run.accelerator.scaler.get_scale() if run.accelerator.scaler else None,
    }


@pytest.mark.parametrize(
    ("world_size", "precision", "before"), [(1, "fp16", 3), (2, "no", 5), (2, "fp16", 8), (4, "bf16", 5)]
)
def test_a_run_that_continues_is_bit_for_bit_the_run_that_was_not_interrupted(
    run_distributed, tmp_path: Path, world_size: int, precision: str, before: int
) -> None:
    scheduler = "steps" if before == 8 else "cosine"
    expected = run_distributed(uninterrupted, world_size, precision, before, scheduler)
    actual = run_distributed(interrupted, world_size, str(tmp_path / "state"), precision, before, scheduler)
    for mine, theirs in zip(actual, expected, strict=True):
        assert problems.difference(mine.pop("parameters"), theirs.pop("parameters")) == 0
        assert mine == theirs


def save_once(directory: str) -> None:
    run = Run("fp16", seed=0)
    run.train(2)
    run.accelerator.save_state(directory)


def load_once(directory: str) -> list[str]:
    found: list[str] = []
    run = Run("fp16", seed=0)
    sys.addaudithook(lambda event, args: found.append(event) if event == "pickle.find_class" else None)
    run.accelerator.load_state(directory)
    return list(found)


def test_no_pickle_is_written_or_read(run_distributed, tmp_path: Path) -> None:
    directory = tmp_path / "state"
    run_distributed(save_once, 1, str(directory))
    for path in directory.iterdir():
        assert path.suffix in (".json", ".safetensors")
        if path.suffix == ".json":
            json.loads(path.read_text())
    assert run_distributed(load_once, 1, str(directory)) == [[]]


def named_saves(directory: str) -> dict[str, Any]:
    project = ProjectConfiguration(directory, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    plain = nn.Linear(1, 1)
    accelerator.prepare(plain)
    names = []
    for i in range(4):
        plain.weight.data.fill_(i)
        names.append(Path(accelerator.save_state()).name)
    plain.weight.data.fill_(-1)
    accelerator.load_state()
    newest = plain.weight.item()
    accelerator.load_state(str(Path(directory) / "checkpoints" / "checkpoint_2"))
    return {
        "names": names,
        "newest": newest,
        "named": plain.weight.item(),
        "next": accelerator.save_iteration,
    }


@pytest.mark.parametrize("world_size", [2])
def test_numbered_checkpoints_are_kept_up_to_the_limit(
    run_distributed, tmp_path: Path, world_size: int
) -> None:
    for result in run_distributed(named_saves, world_size, str(tmp_path)):
        assert result["names"] == [f"checkpoint_{i}" for i in range(4)]
        assert (result["newest"], result["named"], result["next"]) == (3, 2, 4)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["checkpoint_2", "checkpoint_3"]


def hooked(directory: str) -> list[Any]:
    accelerator = Accelerator(cpu=True)
    plains = [nn.Linear(1, 1), nn.Linear(2, 2)]
    accelerator.prepare(*plains)
    seen: list[Any] = []

    def before_save(models: list[nn.Module], weights: list[dict[str, Any]], output: str) -> None:
        seen.append(("save", [type(model).__name__ for model in models], len(weights)))
        second = weights.pop()  # the second model is left to this hook
        if accelerator.is_main_process:
            (Path(output) / "own").mkdir()
            save_file(dict(second), Path(output) / "own" / "second.safetensors")

    def before_load(models: list[nn.Module], directory: str) -> None:
        seen.append(("load", len(models)))
        models.pop().load_state_dict(load_file(Path(directory) / "own" / "second.safetensors"))

    handles = [
        accelerator.register_save_state_pre_hook(before_save),
        accelerator.register_load_state_pre_hook(before_load),
    ]
    before = [problems.parameters(plain) for plain in plains]
    accelerator.save_state(directory)
    accelerator.wait_for_everyone()
    seen.append(sorted(saved_files.tensors(directory)))
    seen.append(sorted(name for name in saved_files.manifest(directory)["files"] if "own" in name))
    saved_files.assert_manifest_tells_the_truth(directory)
    accelerator.wait_for_everyone()
    for plain in plains:
        plain.weight.data.fill_(7)
    accelerator.load_state(directory)
    seen.append([problems.difference(problems.parameters(p), b) for p, b in zip(plains, before, strict=True)])
    for handle in handles:
        handle.remove()
    try:
        accelerator.load_state(directory)
    except CheckpointError as error:
        seen.append("a hook removed the weights of model 1" in str(error))
    accelerator.save_state(directory)
    accelerator.wait_for_everyone()
    seen.append(sorted(saved_files.tensors(directory)))
    return seen


@pytest.mark.parametrize("world_size", [2])
def test_hooks_see_the_models_and_may_take_some_over(
    run_distributed, tmp_path: Path, world_size: int
) -> None:
    def only(names: list[str], model: int) -> list[str]:
        return [name for name in names if name.startswith(f"model.{model}.")]

    for seen in run_distributed(hooked, world_size, str(tmp_path / "state")):
        first, own, second = seen[1], seen[2], seen[-1]
        assert seen[0] == ("save", ["Linear", "Linear"], 2)
        assert only(first, 0) == only(second, 0) == ["model.0.bias", "model.0.weight"]
        assert only(first, 1) == []
        assert own == ["own/second.safetensors"]
        assert seen[3:-1] == [("load", 2), [0, 0], True]
        assert only(second, 1) == ["model.1.bias", "model.1.weight"]


def altered(directory: str) -> float:
    accelerator = Accelerator(cpu=True)
    plain = nn.Linear(2, 2)
    accelerator.prepare(plain)
    original = plain.weight.detach().clone()

    def double(models: list[nn.Module], weights: list[dict[str, Any]], output: str) -> None:
        weights[0]["weight"] = weights[0]["weight"] * 2

    accelerator.register_save_state_pre_hook(double)
    accelerator.save_state(directory)
    assert torch.equal(plain.weight, original)
    accelerator.load_state(directory)
    return float((plain.weight - 2 * original).abs().max())


def test_what_a_hook_leaves_of_the_weights_is_what_is_saved(run_distributed, tmp_path: Path) -> None:
    assert run_distributed(altered, 2, str(tmp_path / "state")) == [0, 0]


def drawn_by_a_hook(directory: str) -> bool:
    """Whether what is drawn after a load is what was drawn after the save."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.register_save_state_pre_hook(lambda models, weights, output: nn.Linear(5, 5))
    accelerator.save_state(directory)
    after = torch.rand(3)
    accelerator.load_state(directory)
    return torch.equal(torch.rand(3), after)


def test_random_numbers_go_on_behind_those_that_a_hook_draws(run_distributed, tmp_path: Path) -> None:
    assert run_distributed(drawn_by_a_hook, 1, str(tmp_path / "state")) == [True]


def refused(kind: str, directory: str) -> str:
    accelerator = Accelerator(cpu=True)
    plain = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    accelerator.prepare(plain, optimizer)
    target = str(Path(directory) / "state")
    try:
        if kind == "missing":
            accelerator.load_state(target)
        elif kind == "no directory":
            accelerator.save_state()
        elif kind == "none to load":
            accelerator.load_state()
        elif kind == "none in project":
            project = ProjectConfiguration(directory, automatic_checkpoint_naming=True)
            Accelerator(cpu=True, project_config=project).load_state()
        elif kind == "other objects":
            accelerator.save_state(target)
            accelerator.register_for_checkpointing(Average())
            accelerator.load_state(target)
        elif kind == "other model":
            accelerator.save_state(target)
            other = Accelerator(cpu=True)
            big = nn.Linear(4, 2)
            other.prepare(big, torch.optim.SGD(big.parameters(), lr=0.1))
            other.load_state(target)
        elif kind == "damaged":
            accelerator.save_state(target)
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (Path(target) / "state.json").write_text("{")
            accelerator.wait_for_everyone()
            accelerator.load_state(target)
        elif kind == "unfit object":
            average = Average()
            average.values = [object()]  # type: ignore[list-item]
            accelerator.register_for_checkpointing(average)
            accelerator.save_state(target)
        elif kind == "hook on the last rank":

            def hook(models: Any, weights: Any, output: str) -> None:
                if accelerator.is_last_process:
                    raise ValueError("the disk is full")

            accelerator.register_save_state_pre_hook(hook)
            accelerator.save_state(target)
    except (LockstepError, ValueError) as error:
        published = kind in ("unfit object", "hook on the last rank") and Path(target).exists()
        return f"{error}{' PUBLISHED' if published else ''}"
    return ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing", "There is no checkpoint at"),
        ("no directory", "save_state was called without a directory"),
        ("none to load", "load_state was called without a directory"),
        ("none in project", "There is no checkpoint in"),
        ("other objects", "Prepare and register the same objects"),
        ("other model", "does not fit Linear"),
        ("damaged", "state.json has 1 bytes instead of"),
        ("unfit object", "object.0.values.0 is a object, which a checkpoint cannot hold"),
        ("hook on the last rank", "the disk is full"),
    ],
)
@pytest.mark.parametrize("world_size", [2])
def test_what_cannot_be_saved_or_loaded_is_an_error_on_every_rank(
    run_distributed, tmp_path: Path, world_size: int, kind: str, words: str
) -> None:
    for message in run_distributed(refused, world_size, kind, str(tmp_path)):
        assert words in message
        assert "PUBLISHED" not in message


def test_an_object_without_a_state_cannot_be_registered() -> None:
    expect_refusal(UsageError, "index 0", Accelerator(cpu=True).register_for_checkpointing, 3)


def test_every_kind_of_value_in_a_state_survives() -> None:
    value = {
        "plain": [1, 2.5, None, True, "text"],
        "numbers": (float("inf"), -float("inf"), 1e-300, 2**70),
        "keys": {1: "int", "1": "text", (1, 2): "tuple", None: 0},
        "sets": ({1, 2}, frozenset({3})),
        "counter": Counter({3: 1, 9: 2}),
        "numpy": np.arange(3),
        "dtype": torch.bfloat16,
        "tensors": {"a.b": torch.ones(2), "a": {"b": torch.zeros(3)}, 1: torch.ones(1), "1": torch.zeros(1)},
        "half": torch.ones(2, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
    }
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, tensors, "value"), allow_nan=False)
    found = decode(json.loads(text), tensors)
    assert repr(found) == repr(value)
    assert type(found["counter"]) is Counter
