"""Saved states: a run that continues from one is the run that was not interrupted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from checkpoint import saved_files
from checkpoint.subject import Subject
from lockstep import Accelerator, ProjectConfiguration
from lockstep.errors import CheckpointError, LockstepError, UsageError
from tests.refusals import expect_refusal
from train import problems


class Average:
    """An object of the user's with a state."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])


def save_once(project: str) -> str:
    return str(Subject(Path(project)).train_and_save(steps=2))


def load_once(project: str, directory: str) -> list[str]:
    found: list[str] = []
    run = Subject(Path(project))
    sys.addaudithook(lambda event, args: found.append(event) if event == "pickle.find_class" else None)
    run.accelerator.load_state(directory)
    return list(found)


def test_no_pickle_is_written_or_read(run_distributed, tmp_path: Path) -> None:
    (directory,) = run_distributed(save_once, 1, str(tmp_path))
    for path in Path(directory).iterdir():
        assert path.suffix in (".json", ".safetensors")
        if path.suffix == ".json":
            json.loads(path.read_text())
    assert run_distributed(load_once, 1, str(tmp_path), directory) == [[]]


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
