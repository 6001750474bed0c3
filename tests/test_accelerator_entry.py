"""How much of the source runs in ``Accelerator()``, a save and a load: what nobody has asked for must not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CONSTRUCTOR = """
import os, sys
import lockstep
from lockstep import Accelerator

root = os.path.dirname(lockstep.__file__) + os.sep
entered = set()

def note(frame, event, argument):
    name = frame.f_code.co_filename
    if event == "call" and name.startswith(root):
        entered.add(name[len(root):])

sys.setprofile(note)
accelerator = Accelerator()
sys.setprofile(None)
if accelerator.is_main_process:
    print(*sorted(entered))
accelerator.end_training()
"""
CHECKPOINT = """
import os, sys
import torch
import lockstep
from lockstep import Accelerator

parallel, folder = sys.argv[1:]
root = os.path.dirname(lockstep.__file__) + os.sep

def is_import(frame):
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(root):
            return True
        frame = frame.f_back
    return False

def prepared():
    accelerator = Accelerator(parallel=parallel or None)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    loader = torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=4)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)

def count(action):
    entered = set()
    def note(frame, event, argument):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(root) and name[len(root):] not in entered and not is_import(frame):
            entered.add(name[len(root):])
    sys.setprofile(note)
    action()
    sys.setprofile(None)
    if accelerator.is_main_process:
        print(*sorted(entered))

accelerator, model, optimizer, loader = prepared()
for number, rows in enumerate(loader):
    accelerator.backward(model(rows).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if number == 2:
        break
count(lambda: accelerator.save_state(folder))
accelerator, *_ = prepared()
count(lambda: accelerator.load_state(folder))
accelerator.end_training()
"""
PROCESS = """
import signal, sys, threading
import torch
import torch.distributed as dist
from lockstep import Accelerator, PartialState

FUNCTIONS = sorted(name for name in dir(dist) if callable(getattr(dist, name)))

def look():
    return (
        [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)],
        [thread.name for thread in threading.enumerate()],
        [getattr(dist, name) for name in FUNCTIONS],
        [sys.excepthook],
    )

watch = sys.argv[1] == "watch"
before = look()
accelerator = Accelerator(watch=watch)
if accelerator.num_processes > 1:
    dist.all_reduce(torch.ones(1))
during = look()
PartialState().destroy_process_group()
after = look()
if accelerator.is_main_process:
    print(*(part != earlier for part, earlier in zip(during, before)))
    print(*(part != earlier for part, earlier in zip(after, before)))
"""
WORDS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OF_EVERY_COLLECTIVE = ("comm/", "shared_memory/", "observe/", "control/")
"""Folders that any call of several ranks enters."""


def entered(script: str, ranks: int, *arguments: str) -> list[list[str]]:
    """The files of which code runs on rank 0, for each line that the script prints there."""
    known = {
        name: value
        for name, value in os.environ.items()
        if name not in WORDS and not name.startswith(("LOCKSTEP_", "ACCELERATE_"))
    } | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        place = (rank, ranks, rank, ranks, "127.0.0.1", port) if ranks > 1 else ()
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", script, *arguments],
                env=known | {name: str(value) for name, value in zip(WORDS, place, strict=False)},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    answers = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks
    return [line.split() for line in answers[0].splitlines()]


@pytest.mark.parametrize(
    ("ranks", "most"),
    [
        (1, 21),
        pytest.param(2, 60, marks=pytest.mark.exhaustive),
    ],
)
def test_the_constructor_of_a_plain_script_enters_few_files(ranks: int, most: int) -> None:
    """Those that are only imported included."""
    [files] = entered(CONSTRUCTOR, ranks)
    assert "accelerator.py" in files
    assert not [
        name for name in files if name.startswith(("compat/", "preparation/", "parallel/", "checkpoint/"))
    ]
    assert len(files) <= most, files


@pytest.mark.parametrize(
    ("ranks", "parallel", "most", "most_beside_collectives"),
    [
        # A load also enters that of positions that wait for their loader.
        (1, "", (36, 37), (31, 32)),
        pytest.param(2, "zero=3", (60, 60), (36, 42), marks=pytest.mark.exhaustive),
    ],
)
def test_a_save_and_a_load_enter_few_files(
    tmp_path: Path, ranks: int, parallel: str, most: tuple[int, int], most_beside_collectives: tuple[int, int]
) -> None:
    """Those that are only imported are not counted."""
    save, load = entered(CHECKPOINT, ranks, parallel, str(tmp_path / "state"))
    assert "checkpoint/save.py" in save and "checkpoint/load.py" in load
    for files, limit, limit_beside in zip((save, load), most, most_beside_collectives, strict=True):
        assert len(files) <= limit, files
        beside = [name for name in files if not name.startswith(OF_EVERY_COLLECTIVE)]
        assert len(beside) <= limit_beside, beside


@pytest.mark.parametrize(
    ("ranks", "watch", "changed"),
    [
        (1, False, ["False", "False", "False", "True"]),
        (2, True, ["True", "True", "False", "True"]),
    ],
)
def test_what_the_constructor_changes_in_the_process_is_taken_back_but_the_exception_hook(
    ranks: int, watch: bool, changed: list[str]
) -> None:
    """Signal handlers, threads, nothing of torch.distributed, and sys.excepthook: as the docstring says."""
    during, after = entered(PROCESS, ranks, "watch" if watch else "no watch")
    assert during == changed
    assert after == ["False", "False", "False", "True"]
