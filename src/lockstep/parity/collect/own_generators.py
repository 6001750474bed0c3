"""Generators that a script makes for itself, and whether it draws from them while it trains on a batch.

One process that stands for several ranks draws for all of them from one sequence, where each rank has its own. The
generators of the process are seeded with each batch; those of a script are its own business.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch


class OwnGenerators:
    """Those that were made so far, by where.

    Attributes:
        drawn: (what, where) of each that was drawn from between a batch and its backward, and not seeded there.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[object, str, str]] = {}
        self._states: dict[int, bytes] = {}
        self.drawn: dict[str, str] = {}

    def add(self, generator: object, what: str, where: str) -> None:
        """One was made; ``what`` as it is called, ``where``: file:line."""
        self._made[id(generator)] = generator, what, where

    def clear(self) -> None:
        """Another run begins."""
        self._made.clear()
        self._states.clear()
        self.drawn.clear()

    def batch_comes(self) -> None:
        """What was drawn until now, as by a sampler, does not count."""
        self._states = {key: _state(generator) for key, (generator, _, _) in self._made.items()}

    def backward_comes(self) -> None:
        """What was drawn since the batch came does."""
        for key, before in self._states.items():
            generator, what, where = self._made[key]
            if _state(generator) != before:
                self.drawn[what] = where
        self.batch_comes()

    def seeded(self, generator: object) -> None:
        """A script says what is drawn next: by the batch, if it does so with each."""
        self._states.pop(id(generator), None)


def _state(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    return pickle.dumps(generator.bit_generator.state)


def watched_generator_class(
    made: Callable[[object, FrameType], None], seeded: Callable[[object], None]
) -> type[torch.Generator]:
    """A class for the place of ``torch.Generator``, which calls ``made`` with the frame that made it."""
    original = torch.Generator

    class OfAll(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, original)

    class Generator(original, metaclass=OfAll):  # type: ignore[misc,valid-type]
        def __new__(cls, *args: object, **kwargs: object) -> Any:
            generator = super().__new__(cls, *args, **kwargs)
            made(generator, sys._getframe(1))
            return generator

        def manual_seed(self, seed: int) -> object:
            seeded(self)
            return super().manual_seed(seed)

        def set_state(self, new_state: torch.Tensor) -> object:
            seeded(self)
            return super().set_state(new_state)

    return Generator
