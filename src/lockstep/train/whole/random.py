"""Random numbers that a step draws: the same on all ranks, which must come to the same parameters."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lockstep.comm.tree import StateDict


def state_of_generators() -> dict[str, object]:
    """The states of the global generators of Python, NumPy and torch, on the CPU and the current device."""
    state: dict[str, object] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_generators(state: StateDict) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def are_equal(one: dict[str, object], other: dict[str, object]) -> bool:
    return one.keys() == other.keys() and all(_is_same_state(one[key], other[key]) for key in one)


def _is_same_state(one: object, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_is_same_state, one, other))
    return bool(one == other)


class SharedRandom:
    """Generators of the first rank, for what all ranks compute alike, beside those of each rank."""

    def __init__(self) -> None:
        self._own: dict[str, object] | None = None
        self._shared: dict[str, object] | None = None

    def begin(self) -> None:
        """Draw as the first rank would. Collective."""
        self._own = state_of_generators()
        states = [self._own]
        dist.broadcast_object_list(states, src=0)
        self._shared = states[0]
        if are_equal(self._own, self._shared):
            # As in one process, where there is one sequence of numbers.
            self._own = None
        else:
            set_generators(self._shared)

    def suspend(self) -> None:
        """Draw this rank's own numbers until ``resume``."""
        if self._own is not None:
            self._shared = state_of_generators()
            set_generators(self._own)

    def resume(self) -> None:
        if self._own is not None and self._shared is not None:
            self._own = state_of_generators()
            set_generators(self._shared)

    def end(self) -> None:
        if self._own is not None:
            set_generators(self._own)
        self._own = self._shared = None
