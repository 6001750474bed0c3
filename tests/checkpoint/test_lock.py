"""One run at a time writes a directory, and a run that died does not stand in the way of the next."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lockstep import Accelerator, ProjectConfiguration
from lockstep.checkpoint.store import DirectoryLock
from lockstep.errors import CheckpointError
from tests.refusals import expect_refusal


def hold(path: str, seconds: float, tell: Connection) -> None:
    try:
        lock = DirectoryLock(path, "the run")
        lock.acquire()
    except Exception as error:
        tell.send(str(error))
    else:
        tell.send("held")
        time.sleep(seconds)
    os._exit(0)


@contextmanager
def holder(path: Path, seconds: float = 60) -> Iterator[Any]:
    """Another process that tries to take the lock and says what became of that."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=hold, args=(str(path), seconds, theirs), daemon=True)
    process.start()
    theirs.close()
    process.says = ours  # type: ignore[attr-defined]
    try:
        yield process
    finally:
        process.kill()
        process.join()


def said(process: Any) -> str:
    return str(process.says.recv())


def test_a_second_process_is_refused_at_once_and_told_who_is_there(tmp_path: Path) -> None:
    path = tmp_path / "runs" / ".lock"
    with holder(path) as other:
        assert said(other) == "held"
        started = time.monotonic()
        with pytest.raises(CheckpointError) as caught:
            DirectoryLock(str(path), "the folder").acquire()
        assert time.monotonic() - started < 2
    message = str(caught.value)
    assert message.startswith(
        f"the folder is being written by process {other.pid} on {socket.gethostname()} since 2"
    )
    assert "End that run, or save to a directory of your own." in message


def test_a_killed_process_holds_nothing_and_its_file_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with holder(path) as other:
        assert said(other) == "held"
        os.kill(other.pid, signal.SIGKILL)
        other.join()
    assert json.loads(path.read_text())["process"] == other.pid
    lock = DirectoryLock(str(path), "x")
    lock.acquire()
    with holder(path) as second:
        assert f"being written by process {os.getpid()}" in said(second)
    lock.release()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"process": 1}', b"\xff" * 5000])
def test_what_a_file_says_is_no_lock(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / ".lock"
    path.write_bytes(content)
    lock = DirectoryLock(str(path), "x")
    lock.acquire()
    assert json.loads(path.read_text())["process"] == os.getpid()
    lock.release()


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("text")
    (tmp_path / ".lock").symlink_to(tmp_path / "precious")
    expect_refusal(OSError, "symbolic link", DirectoryLock(str(tmp_path / ".lock"), "x").acquire)
    assert (tmp_path / "precious").read_text() == "text"


# -- whole runs ---------------------------------------------------------------------------------------------


def numbered(folder: Path, **options: int) -> Accelerator:
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, **options)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(nn.Linear(1, 1))
    return accelerator


def test_a_project_that_another_run_writes_is_refused_until_that_run_is_over(tmp_path: Path) -> None:
    accelerator = numbered(tmp_path)
    with holder(tmp_path / "checkpoints" / ".lock") as other:
        assert said(other) == "held"
        started = time.monotonic()
        with pytest.raises(CheckpointError, match=f"process {other.pid}"):
            accelerator.save_state()
        assert time.monotonic() - started < 2
        assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [".lock"]
    assert Path(accelerator.save_state()).name == "checkpoint_0"
    accelerator.end_training()


def test_a_run_keeps_its_project_and_gives_it_back_at_its_end(tmp_path: Path) -> None:
    accelerator = numbered(tmp_path)
    accelerator.save_state()
    path = tmp_path / "checkpoints" / ".lock"
    with holder(path) as other:
        assert f"process {os.getpid()}" in said(other)
    accelerator.end_training()
    with holder(path) as other:
        assert said(other) == "held"


def test_a_directory_by_name_is_locked_while_it_is_written(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    tried: list[str] = []

    def look(models: object, weights: object, output: str) -> None:
        with holder(tmp_path / "state.lock") as other:
            tried.append(said(other))

    accelerator.register_save_state_pre_hook(look)
    accelerator.save_state(tmp_path / "state")
    assert f"process {os.getpid()}" in tried[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state"]


def test_a_failed_save_lets_go_of_its_lock(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)

    def fail(models: object, weights: object, output: str) -> None:
        raise ValueError("no")

    handle = accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(ValueError):
        accelerator.save_state(tmp_path / "state")
    handle.remove()
    with holder(tmp_path / "state.lock", seconds=0) as other:
        assert said(other) == "held"
        other.join()
    accelerator.save_state(tmp_path / "state")


def test_the_end_of_one_accelerator_leaves_the_lock_of_another(tmp_path: Path) -> None:
    first, second = numbered(tmp_path), numbered(tmp_path, iteration=1)
    first.save_state()
    second.save_state()
    second.end_training()
    with holder(tmp_path / "checkpoints" / ".lock") as other:
        assert f"process {os.getpid()}" in said(other)
