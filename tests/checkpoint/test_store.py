"""The store on local disks: what it replaces, what it leaves alone, and what an interrupted save leaves behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import nn

from checkpoint import saved_files
from lockstep import Accelerator
from lockstep.checkpoint.store import LocalStore
from lockstep.errors import CheckpointError, UsageError
from tests.refusals import expect_refusal

STORE = LocalStore()


class Run:
    """A model of one number, which says from which save its state is."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(cpu=True)
        self.model = nn.Linear(1, 1)
        self.accelerator.prepare(self.model)

    def save(self, directory: Path, number: int) -> None:
        self.model.weight.data.fill_(number)
        self.accelerator.save_state(directory)

    def load(self, directory: Path) -> float:
        self.model.weight.data.fill_(-1)
        self.accelerator.load_state(directory)
        return self.model.weight.item()


def below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- files --------------------------------------------------------------------------------------------------


# -- what is in the way -------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["folder", "file", "link to a folder", "old"])
def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path, what: str) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years")
    target = tmp_path / "state"
    if what == "folder":
        (tmp_path / "precious").rename(target)
    elif what == "file":
        (tmp_path / "precious" / "thesis.txt").rename(target)
    elif what == "link to a folder":
        target.symlink_to(tmp_path / "precious")
    elif what == "old":
        (tmp_path / "precious").rename(tmp_path / "state.old")
    expect_refusal(UsageError, "is no checkpoint", Run().save, target, 1)
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.read_text() for path in kept] == ["years"]
    assert not any(path.name.endswith(".partial") for path in tmp_path.iterdir())


def test_an_empty_folder_may_become_a_checkpoint(tmp_path: Path) -> None:
    run = Run()
    run.save(tmp_path, 3)
    assert run.load(tmp_path) == 3
    saved_files.assert_manifest_tells_the_truth(tmp_path)


def test_a_file_in_place_of_the_folder_above_is_an_error_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError):
        Run().save(tmp_path / "file" / "state", 1)


def test_a_checkpoint_is_replaced_as_a_whole(tmp_path: Path) -> None:
    run, target = Run(), tmp_path / "state"

    def leave(models: object, weights: object, output: str) -> None:
        (Path(output) / "notes.txt").write_text("x")

    handle = run.accelerator.register_save_state_pre_hook(leave)
    run.save(target, 1)
    handle.remove()
    assert (target / "notes.txt").exists()
    run.save(target, 2)
    assert not (target / "notes.txt").exists()
    assert run.load(target) == 2
    assert below(tmp_path) == ["state"]


@pytest.mark.parametrize("kind", ["file", "folder", "checkpoint"])
def test_links_in_a_checkpoint_are_not_followed(tmp_path: Path, kind: str) -> None:
    run, target = Run(), tmp_path / "state"
    run.save(target, 1)
    file = next(target.glob("model*"))
    if kind == "file":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
        target.rename(tmp_path / "elsewhere")
        target.mkdir()
        (target / "manifest.json").symlink_to(tmp_path / "elsewhere" / "manifest.json")
        (target / "more").symlink_to(tmp_path / "elsewhere")
    else:
        (target / "manifest.json").rename(tmp_path / "manifest.json")
        (target / "manifest.json").symlink_to(tmp_path / "manifest.json")
    expect_refusal(CheckpointError, "link", run.load, target)


# -- what a killed process leaves ---------------------------------------------------------------------------


def checkpoint_at(run: Run, directory: Path, number: int) -> None:
    run.save(directory.with_name("made"), number)
    directory.with_name("made").rename(directory)


def damage(directory: Path) -> None:
    with next(directory.glob("model*")).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def test_the_old_one_outlives_a_failed_save_over_a_damaged_successor(tmp_path: Path) -> None:
    run, target = Run(), tmp_path / "state"
    checkpoint_at(run, target, 2)
    checkpoint_at(run, tmp_path / "state.old", 1)
    damage(target)

    def fail(models: object, weights: object, output: str) -> None:
        raise ValueError("no")

    handle = run.accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(ValueError):
        run.save(target, 3)
    handle.remove()
    assert run.load(target) == 1
    run.save(target, 4)
    assert run.load(target) == 4
    assert below(tmp_path) == ["state"]


def test_removing_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "link").symlink_to(tmp_path / "precious")
    STORE.remove(str(tmp_path / "state"))
    assert below(tmp_path) == ["precious"]
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "years"
