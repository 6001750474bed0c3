"""How much of the source runs in ``Accelerator()``: what nobody has asked for must not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

SCRIPT = """
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
WORDS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def entered(ranks: int) -> list[str]:
    """The files of which code runs on rank 0, those that are only imported included."""
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
                [sys.executable, "-c", SCRIPT],
                env=known | {name: str(value) for name, value in zip(WORDS, place, strict=False)},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    answers = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks
    return answers[0].split()


@pytest.mark.parametrize(
    ("ranks", "most"),
    [
        (1, 20),
        pytest.param(2, 60, marks=pytest.mark.exhaustive),
    ],
)
def test_the_constructor_of_a_plain_script_enters_few_files(ranks: int, most: int) -> None:
    files = entered(ranks)
    assert "accelerator.py" in files
    assert not [
        name for name in files if name.startswith(("compat/", "preparation/", "parallel/", "checkpoint/"))
    ]
    assert len(files) <= most, files
