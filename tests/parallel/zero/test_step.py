"""A step of a sharded model enters few files, so that a reader can follow it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import lockstep
from lockstep import Accelerator
from parallel.blocks_and_root import BlocksAndRoot

SOURCE = Path(lockstep.__file__).parent
MOST_FILES = 28
"""Without the measures, which look on."""


def entered() -> set[str]:
    """The files of the package whose functions the third step calls, on gloo."""
    torch.distributed.init_process_group("gloo")
    accelerator = Accelerator(cpu=True, parallel="zero=3 blocks=blocks.*")
    model = BlocksAndRoot(8, 3)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE) and "observe" not in path.parts:
            found.add(str(path.relative_to(SOURCE)))

    for step in range(3):
        sys.setprofile(note if step == 2 else None)
        accelerator.backward(model(torch.ones(2, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    sys.setprofile(None)
    return found


def test_a_step_enters_few_files(run_distributed: Any) -> None:
    for found in run_distributed(entered, 2):
        assert len(found) <= MOST_FILES, sorted(found)
        assert not any(file.startswith(("check/", "parity/", "checkpoint/")) for file in found)
