"""Files that are put into a checkpoint's folder after it was saved: no part of it, and never lost with it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from checkpoint.test_store import Run
from lockstep import Accelerator, ProjectConfiguration
from lockstep.cli import run_lockstep
from lockstep.errors import CheckpointError


def add(directory: Path) -> dict[str, str]:
    """An export, a note, a hidden file, a link and a pipe; the texts of the plain files."""
    files = {
        "model/config.json": "{}",
        "model/model.safetensors": "weights",
        "notes.txt": "mine",
        ".git/HEAD": "x",
    }
    for name, text in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    (directory / "latest").symlink_to("nowhere")
    if not (directory / "pipe").exists():
        os.mkfifo(directory / "pipe")
    return files


def texts(directory: Path, names: Any) -> dict[str, str]:
    return {name: (directory / name).read_text() for name in names}


def verified(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> tuple[int, str]:
    """The exit code of ``lockstep checkpoint verify``, and what it printed."""
    with pytest.raises(SystemExit) as ended:
        run_lockstep(["checkpoint", "verify", *options, str(path)])
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().out


def test_what_was_added_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run()
    run.save(tmp_path / "state", 3)
    files = add(tmp_path / "state")
    with caplog.at_level(logging.WARNING, "lockstep.checkpoint"):
        for _ in range(2):
            assert run.load(tmp_path / "state") == 3
    assert caplog.messages == []
    code, output = verified(capsys, tmp_path / "state")
    assert code == 0
    assert "6 files were added to it later, which loading passes over: .git/HEAD, latest" in output
    assert texts(tmp_path / "state", files) == files


@pytest.mark.parametrize("name", ["state.json", "model-00000.safetensors"])
def test_what_is_listed_must_still_be_what_was_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run = Run()
    run.save(tmp_path / "state", 3)
    add(tmp_path / "state")
    content = bytearray((tmp_path / "state" / name).read_bytes())
    content[-3] ^= 1
    (tmp_path / "state" / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        run.load(tmp_path / "state")
    assert verified(capsys, tmp_path / "state")[0] == 1


@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_replaces_a_checkpoint_takes_along_what_was_added(tmp_path: Path, is_damaged: bool) -> None:
    """As saving into one folder again and again does elsewhere: what others put there stays."""
    run, target = Run(), tmp_path / "last"
    run.save(target, 1)
    files = add(target)
    if is_damaged:
        (target / "manifest.json").write_text("{}")
    for step in (2, 3):
        run.save(target, step)
        assert texts(target, files) == files
        assert os.readlink(target / "latest") == "nowhere"
        assert run.load(target) == step
        assert sorted(path.name for path in tmp_path.iterdir()) == ["last"]


def test_what_was_added_outlives_a_kill_between_publishing_and_removing(tmp_path: Path) -> None:
    run, target = Run(), tmp_path / "last"
    run.save(target, 1)
    files = add(target)
    run.save(tmp_path / "other", 2)
    target.rename(tmp_path / "last.old")
    (tmp_path / "other").rename(target)
    assert run.load(target) == 2
    run.save(target, 3)
    assert texts(target, files) == files and not (tmp_path / "last.old").exists()


def test_the_limit_removes_checkpoints_but_not_what_was_added(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = accelerator.prepare(nn.Linear(3, 2))
    folder = tmp_path / "checkpoints"
    with caplog.at_level(logging.WARNING, "lockstep.checkpoint"):
        for number in range(3):
            directory = Path(accelerator.save_state())
            if number == 0:
                files = add(directory)
                accelerator.save_model(model, directory / "export")
    assert sorted(os.listdir(folder / "checkpoint_0")) == [
        ".git",
        "export",
        "latest",
        "model",
        "notes.txt",
        "pipe",
    ]
    assert texts(folder / "checkpoint_0", files) == files
    assert load_file(folder / "checkpoint_0" / "export" / "model.safetensors").keys() == {"weight", "bias"}
    assert sorted(path.name for path in folder.glob("c*")) == ["checkpoint_0", "checkpoint_2"]
    [message] = caplog.messages
    assert "Removed the checkpoint" in message and "kept .git/HEAD" in message
    assert accelerator.load_state() == str(folder / "checkpoint_2")
    accelerator.end_training()
    code, output = verified(capsys, tmp_path, "--all")
    assert code == 0 and "checkpoint_2: OK" in output
    torch.manual_seed(0)
    again = Accelerator(cpu=True, project_config=project)
    again.prepare(nn.Linear(3, 2))
    again.load_state()
    assert Path(again.save_state()).name == "checkpoint_3"
    assert texts(folder / "checkpoint_0", files) == files


def test_files_beside_a_checkpoint_at_a_url_stay(tmp_path: Path) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    run = Run()
    url = f"memory://added{tmp_path}"
    run.save(f"{url}/last", 1)
    files.pipe_file(f"/added{tmp_path}/last/model/config.json", b"{}")
    run.save(f"{url}/last", 2)
    assert run.load(f"{url}/last") == 2
    assert files.cat_file(f"/added{tmp_path}/last/model/config.json") == b"{}"
    project = ProjectConfiguration(f"{url}/run", automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(nn.Linear(3, 2))
    for number in range(3):
        directory = accelerator.save_state()
        if number == 0:
            files.pipe_file(directory.removeprefix("memory:/") + "/notes.txt", b"mine")
    first = f"/added{tmp_path}/run/checkpoints/checkpoint_0"
    assert files.find(first) == [f"{first}/notes.txt"]
    assert accelerator.load_state().endswith("checkpoint_2")
    accelerator.end_training()
