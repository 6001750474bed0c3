"""Numbered checkpoints: which come next, which are looked at first, which are removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lockstep import Accelerator, ProjectConfiguration
from lockstep.checkpoint import next_directory, numbers, superfluous
from lockstep.checkpoint.store import LocalStore
from lockstep.errors import CheckpointError, ConfigError, NoCheckpointError, UsageError
from tests.refusals import expect_refusal

STORE = LocalStore()


def project(folder: Path, **options: Any) -> ProjectConfiguration:
    return ProjectConfiguration(folder, automatic_checkpoint_naming=True, **options)


def folders(root: Path, *names: str) -> None:
    for name in names:
        (root / "checkpoints" / name).mkdir(parents=True)


def names(paths: list[str]) -> list[str]:
    return [Path(path).name for path in paths]


STRAY = (
    *("checkpoint_", "checkpoint_01", "checkpoint_-1", "checkpoint_1x", "checkpoint_1.5", "xcheckpoint_1"),
    *("checkpoint_1_2", "checkpoint_" + "9" * 30, "logs", "7", ".lock", "checkpoint_\N{SUPERSCRIPT TWO}"),
    *(
        "checkpoint_7.partial",
        "checkpoint_8.old",
        "checkpoint_9.removed",
        "checkpoint_\N{ARABIC-INDIC DIGIT ONE}",
    ),
)


def test_numbers_are_ordered_as_numbers_and_others_are_ignored(tmp_path: Path) -> None:
    folders(tmp_path, "checkpoint_10", "checkpoint_9", "checkpoint_0", "checkpoint_100", *STRAY)
    (tmp_path / "checkpoints" / "checkpoint_11").write_text("a file")
    assert numbers(str(tmp_path / "checkpoints"), STORE) == [0, 9, 10, 100]
    assert numbers(str(tmp_path / "nowhere"), STORE) == []


@pytest.mark.parametrize("suffix", [".partial", ".old", ".removed"])
def test_a_name_of_unfinished_checkpoints_is_refused(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(UsageError, match="suffix"):
        next_directory(str(tmp_path / f"s{suffix}"), project(tmp_path), STORE)
    with pytest.raises(UsageError):
        Accelerator(cpu=True).save_state(tmp_path / f"s{suffix}")


@pytest.mark.parametrize("there", [[], [5], [0, 1, 2], [3, 10, 20, 30]])
@pytest.mark.parametrize("limit", [1, 2, 3, 10])
def test_the_oldest_beyond_the_limit_go(tmp_path: Path, there: list[int], limit: int) -> None:
    """With the new one there are at most ``limit``, and those that stay are newer than those that go."""
    folders(tmp_path, *(f"checkpoint_{number}" for number in there))
    for folder in tmp_path.glob("checkpoints/*"):
        (folder / "manifest.json").write_text("{}")
    new = str(tmp_path / "checkpoints" / "checkpoint_40")
    going = names(superfluous(new, project(tmp_path, total_limit=limit), STORE))
    staying = [number for number in there if f"checkpoint_{number}" not in going]
    assert len(staying) + 1 == min(limit, len(there) + 1)
    assert going == [f"checkpoint_{number}" for number in there[: len(there) - len(staying)]]


@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
def test_a_limit_below_one_is_refused(tmp_path: Path, limit: Any) -> None:
    with pytest.raises(ConfigError):
        project(tmp_path, total_limit=limit)


# -- whole runs ---------------------------------------------------------------------------------------------


def run(folder: Path, **options: Any) -> tuple[Accelerator, nn.Linear]:
    accelerator = Accelerator(cpu=True, project_config=project(folder, **options))
    plain = nn.Linear(1, 1)
    accelerator.prepare(plain)
    return accelerator, plain


def there(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if path.is_dir())


def test_after_loading_an_older_one_the_newer_ones_are_not_overwritten(tmp_path: Path) -> None:
    accelerator, plain = run(tmp_path)
    for i in range(3):
        plain.weight.data.fill_(i)
        accelerator.save_state()
    resumed, weights = run(tmp_path)
    found = resumed.load_state(tmp_path / "checkpoints" / "checkpoint_1")
    assert (Path(found).name, weights.weight.item()) == ("checkpoint_1", 1)
    assert Path(resumed.save_state()).name == "checkpoint_3"
    assert there(tmp_path) == [f"checkpoint_{i}" for i in range(4)]
    assert Path(resumed.save_state()).name == "checkpoint_4"


def test_a_new_run_does_not_overwrite_what_it_has_not_loaded(tmp_path: Path) -> None:
    accelerator, plain = run(tmp_path)
    accelerator.save_state()
    other, _ = run(tmp_path)
    expect_refusal(UsageError, "checkpoint_0", other.save_state)
    plain.weight.data.fill_(5)
    accelerator.load_state()
    assert plain.weight.item() != 5


def test_saves_by_name_count_nothing(tmp_path: Path) -> None:
    accelerator, _ = run(tmp_path)
    accelerator.save_state(tmp_path / "elsewhere")
    assert Path(accelerator.save_state()).name == "checkpoint_0"
    assert accelerator.save_iteration == 1


def test_a_failed_save_keeps_its_number_and_removes_nothing(tmp_path: Path) -> None:
    accelerator, _ = run(tmp_path, total_limit=1)
    accelerator.save_state()

    def fail(models: object, weights: object, output: str) -> None:
        raise ValueError("no")

    handle = accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(ValueError):
        accelerator.save_state()
    assert there(tmp_path) == ["checkpoint_0"]
    handle.remove()
    assert Path(accelerator.save_state()).name == "checkpoint_1"
    assert there(tmp_path) == ["checkpoint_1"]


def test_folders_that_no_run_of_ours_wrote_stay(tmp_path: Path) -> None:
    other = tmp_path / "checkpoints" / "checkpoint_0"
    other.mkdir(parents=True)
    (other / "random_states_0.pkl").write_bytes(b"theirs")
    with pytest.raises(CheckpointError, match=r"manifest\.json") as raised:
        run(tmp_path, total_limit=1)[0].load_state()
    assert not isinstance(raised.value, NoCheckpointError)  # scripts would start anew on it
    kept = run(tmp_path, total_limit=1)[0]
    kept.project_configuration.iteration = 1
    for _ in range(3):
        kept.save_state()
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("c*")) == [
        "checkpoint_0",
        "checkpoint_3",
    ]


def test_what_was_found_damaged_goes_first(tmp_path: Path) -> None:
    kept = run(tmp_path, total_limit=3)[0]
    for _ in range(3):
        kept.save_state()
    kept.end_training()
    damaged = tmp_path / "checkpoints" / "checkpoint_2" / "state.json"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    again = run(tmp_path, total_limit=2)[0]
    assert Path(again.load_state()).name == "checkpoint_1"
    again.save_state()
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("c*")) == [
        "checkpoint_1",
        "checkpoint_3",
    ]


@pytest.mark.parametrize("iteration", [-1, 1.5, True, "3", None])
def test_a_number_that_is_none_is_refused(iteration: Any) -> None:
    with pytest.raises(ConfigError):
        ProjectConfiguration(iteration=iteration)


def differing_saves(folder: str) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UsageError, match="blocking"):
        accelerator.save_state(folder, blocking=accelerator.is_main_process)
    if not accelerator.is_main_process:
        accelerator.register_for_checkpointing(torch.optim.SGD([torch.zeros(1)], 0.1))
    with pytest.raises(UsageError, match="Rank 0.*rank 1"):
        accelerator.save_state(folder)


def test_ranks_that_save_differently_are_told(run_distributed: Any, tmp_path: Path) -> None:
    run_distributed(differing_saves, 2, str(tmp_path / "state"))


def test_a_chained_scheduler_goes_on(tmp_path: Path) -> None:
    def prepared() -> tuple[Accelerator, Any]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
        parts = [lr_scheduler.ConstantLR(optimizer, 0.1, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        accelerator = Accelerator(cpu=True)
        return accelerator, accelerator.prepare(
            optimizer, lr_scheduler.ChainedScheduler(parts, optimizer=optimizer)
        )

    accelerator, (optimizer, scheduler) = prepared()
    optimizer.step()
    scheduler.step()
    accelerator.save_state(tmp_path / "state")
    other, (_, again) = prepared()
    other.load_state(tmp_path / "state")
    assert again.get_last_lr() == scheduler.get_last_lr()
