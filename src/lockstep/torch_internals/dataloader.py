"""``DataLoader``: the worker processes of an iterator."""

from __future__ import annotations

from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader

from lockstep.torch_internals.versions import expect, probed


def workers_of(iterator: object) -> list[BaseProcess]:
    """Relies on: ``_workers`` of an iterator of a loader are its processes; there is none without."""
    return list(getattr(iterator, "_workers", None) or ())


@probed("DataLoader", "has its workers")
def probe() -> None:
    """Look at the loop of an iterator with workers, without starting one."""
    code = torch.utils.data.dataloader._MultiProcessingDataLoaderIter.__init__.__code__
    expect("_workers" in code.co_names, "the workers of an iterator")
    numbers: Any = range(2)
    expect(workers_of(iter(DataLoader(numbers))) == [], "an iterator without workers")
