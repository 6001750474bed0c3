"""Random number generators with a private state: of an epoch, of a stream, of a worker's batch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
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


def mixed_seed(*key: int) -> int:
    """64 bits that depend on each number of ``key``, in its place."""
    entropy = [number % 2**64 for number in key]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])


def seed_generators(seed: int) -> None:
    """Seed the generators of this process on the CPU: torch's, Python's and NumPy's global ones."""
    # torch.manual_seed would also reach for devices, which a forked worker must not touch.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def draw_privately(
    items: Iterable[T], seed: int, block_size: int = 256, device: str | None = "cpu"
) -> Iterator[T]:
    """Yield ``items`` as if the global generators of torch, Python and NumPy had been seeded with ``seed``.

    Items are drawn in blocks; between blocks the global generators are the user's own, untouched. While they are
    drawn, ``device`` is torch's default one (None: it stays).
    """
    state = _seeded_states(seed)
    source: Iterator[T] | None = None
    while True:
        # Samplers call torch.randperm without a device; the order must not depend on the default one.
        with _states(state), _default_device(device):
            source = iter(items) if source is None else source
            block = list(islice(source, block_size))
            state = _read_states()
        yield from block
        if len(block) < block_size:
            return


def generator_states() -> dict[str, Any]:
    """The states of the global CPU generators as tensors and plain values, for ``set_generator_states``."""
    states = _read_states()
    version, words, gauss = states["python"]
    numpy_kind, numpy_words, *numpy_rest = states["numpy"]
    return {
        "torch": states["torch"],
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "kind": numpy_kind,
            "words": torch.from_numpy(numpy_words.astype(np.int64)),
            "rest": [int(numpy_rest[0]), int(numpy_rest[1]), float(numpy_rest[2])],
        },
    }


def set_generator_states(states: Mapping[str, Any]) -> None:
    python, numpy_state = states["python"], states["numpy"]
    words = numpy_state["words"].numpy().astype(np.uint32)
    _write_states(
        {
            "torch": states["torch"],
            "python": (python["version"], tuple(python["words"].tolist()), python["gauss"]),
            "numpy": (numpy_state["kind"], words, *numpy_state["rest"]),
        }
    )


@contextmanager
def _states(inner: dict[str, Any]) -> Iterator[None]:
    outer = _read_states()
    _write_states(inner)
    try:
        yield
    finally:
        _write_states(outer)


@contextmanager
def _default_device(device: str | None) -> Iterator[None]:
    if device is None:
        yield
        return
    with torch.device(device):
        yield


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
