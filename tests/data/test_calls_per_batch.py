"""How much Python runs for each batch of a prepared loader. Calls are counted, which no other process disturbs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lockstep
from lockstep import Accelerator
from lockstep.runtime import end_runtime

SOURCE = str(Path(lockstep.__file__).parent)
BATCHES = 100
BEGINNING = 10
"""Batches before those that are counted: with them workers are made, and told of the epoch."""


def calls_of(loader: Iterable[object]) -> tuple[int, Counter[str]]:
    """Calls of Python functions (and resumed generators) in ``BATCHES`` batches: all, and by name those of Lockstep."""
    total, own = 0, Counter[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal total
        if event == "call":
            total += 1
            if frame.f_code.co_filename.startswith(SOURCE):
                own[frame.f_code.co_name] += 1

    batches = iter(loader)
    for _ in range(BEGINNING):
        next(batches)
    sys.setprofile(note)
    for _ in range(BATCHES):
        next(batches)
    sys.setprofile(None)
    return total, own


class Rows(IterableDataset[object]):
    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[object]:
        return iter(self.data)


def per_batch(batch_size: int, workers: int, iterable: bool = False) -> tuple[float, dict[str, int]]:
    """Calls for each batch: what a prepared loader makes more than torch's, and those of Lockstep's own code.

    Several ranks draw thousands of samples at once, which counts for none of their batches.
    """
    accelerator = Accelerator(cpu=True)
    rows = batch_size * (BATCHES + 2 * BEGINNING) * accelerator.num_processes
    data: Any = TensorDataset(torch.zeros(rows, 2), torch.zeros(rows))
    data = Rows(data) if iterable else data
    plain = DataLoader(data, batch_size, shuffle=not iterable, num_workers=workers)
    prepared = accelerator.prepare(DataLoader(data, batch_size, shuffle=not iterable, num_workers=workers))
    calls_of_torch, _ = calls_of(plain)
    calls, own = calls_of(prepared)
    end_runtime()
    return (calls - calls_of_torch) / BATCHES, {name: round(count / BATCHES) for name, count in own.items()}


@pytest.mark.parametrize(("world", "batch_size"), [(1, 2), (2, 32)])
def test_a_batch_takes_few_calls_more_than_torchs(run_distributed, world, batch_size) -> None:
    """The loop's generator; counting, moving and showing a batch; measures. The dealing replaces torch's batch sampler.

    They are as many for a large batch: nothing is called for each sample.
    """
    for extra, own in run_distributed(per_batch, world, batch_size, 0):
        assert sum(own.values()) <= 12, own
        if world == 1:
            assert extra <= 11, own
