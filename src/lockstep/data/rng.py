"""Random number generators with a private state for each epoch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")


def epoch_seed(seed: int, epoch: int) -> int:
    """``seed + epoch``, as torch's ``DistributedSampler`` adds them, within what a generator accepts."""
    return (seed + epoch) % 2**64


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """A CPU generator in the state that begins an epoch."""
    return torch.Generator(device="cpu").manual_seed(epoch_seed(seed, epoch))


def draw_privately(items: Iterable[T], seed: int, block_size: int = 256) -> Iterator[T]:
    """Yield ``items`` as if the global generators of torch, Python and NumPy had been seeded with ``seed``.

    Items are drawn in blocks; between blocks the global generators are the user's own, untouched.
    """
    state = _seeded_states(seed)
    source: Iterator[T] | None = None
    while True:
        with _states(state):
            source = iter(items) if source is None else source
            block = list(islice(source, block_size))
            state = _read_states()
        yield from block
        if len(block) < block_size:
            return


@contextmanager
def _states(inner: dict[str, Any]) -> Iterator[None]:
    outer = _read_states()
    _write_states(inner)
    try:
        # Samplers call torch.randperm without a device; the order must not depend on the default one.
        with torch.device("cpu"):
            yield
    finally:
        _write_states(outer)


def _seeded_states(seed: int) -> dict[str, Any]:
    return {
        "torch": torch.Generator(device="cpu").manual_seed(seed).get_state(),
        "python": random.Random(seed).getstate(),
        "numpy": np.random.RandomState(seed % 2**32).get_state(),
    }


def _read_states() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}


def _write_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
