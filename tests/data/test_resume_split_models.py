"""A run goes on in its order where the processes become more or fewer, but not the ranks with batches of their own.

The oracle is plain torch's loader in an uninterrupted run.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep import Accelerator
from lockstep.runtime import end_runtime

ROWS, BATCH, EPOCHS = 24, 8, 3
STOPS = [(0, 1), (0, 3), (1, 2)]
"""Epoch, and steps of it."""


def loader_of(kind: str) -> DataLoader[Any]:
    torch.manual_seed(8)
    rows = torch.arange(ROWS)
    if kind == "own":
        return DataLoader(rows, BATCH, shuffle=True, generator=torch.Generator().manual_seed(8))  # type: ignore[arg-type]
    return DataLoader(rows, BATCH, shuffle=True)  # type: ignore[arg-type]


def accelerator_of(parallel: str) -> Accelerator:
    return Accelerator(cpu=True, split_batches=True, **({"parallel": parallel} if parallel else {}))


def save(folder: str, parallel: str) -> None:
    for kind in ("own", "global"):
        for number, (epoch, steps) in enumerate(STOPS):
            accelerator = accelerator_of(parallel)
            loader = accelerator.prepare(loader_of(kind))
            for _ in range(epoch):
                list(loader)
            for step, _ in enumerate(loader):
                if step + 1 == steps:
                    accelerator.save_state(f"{folder}/{kind}{number}")
    end_runtime()


def load(folder: str, parallel: str) -> dict[str, list[list[int]]]:
    found = {}
    for kind in ("own", "global"):
        for number, (epoch, _) in enumerate(STOPS):
            accelerator = accelerator_of(parallel)
            loader = accelerator.prepare(loader_of(kind))
            torch.manual_seed(77)
            accelerator.load_state(f"{folder}/{kind}{number}")
            rows = [
                accelerator.gather_for_metrics(batch).tolist()
                for _ in range(EPOCHS - epoch)
                for batch in loader
            ]
            found[f"{kind}{number}"] = rows[: EPOCHS * ROWS // BATCH - steps_behind(number)]
    end_runtime()
    return found


def steps_behind(number: int) -> int:
    epoch, steps = STOPS[number]
    return epoch * ROWS // BATCH + steps


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        ((1, ""), (2, "")),
        ((1, ""), (2, "tp=2")),
        ((2, "pp=2"), (1, "")),
        ((4, "tp=2"), (2, "")),
        ((2, ""), (4, "cp=2")),
    ],
)
def test_a_run_goes_on_in_its_order(run_distributed: Any, saved: Any, here: Any, tmp_path: Any) -> None:
    run_distributed(save, saved[0], str(tmp_path), saved[1])
    for found in run_distributed(load, here[0], str(tmp_path), here[1]):
        for kind in ("own", "global"):
            plain = loader_of(kind)
            whole = [batch.tolist() for _ in range(EPOCHS) for batch in plain]
            for number in range(len(STOPS)):
                assert found[f"{kind}{number}"] == whole[steps_behind(number) :], (kind, STOPS[number])
