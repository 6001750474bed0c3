"""What a script draws or reads that another run of it does not: generators without a seed, the time, the network.

Generators that a script makes for itself are watched too. One process that stands for several ranks draws for all of
them from one sequence, where each rank has its own. The generators of the process are seeded with each batch; those of
a script are its own business.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
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

    # Generators that torch and libraries make are no instances of the subclass, but must seem to be.
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


class SourceWatch:
    """Notes the first call of each such source by the script's own files.

    Args:
        folder: Where these are; installed packages inside of it do not count.

    Attributes:
        generators: Those that the script makes for itself.
    """

    def __init__(self, folder: str) -> None:
        self._folder = os.path.realpath(folder)
        self._found: dict[str, str] = {}
        self.generators = OwnGenerators()

    @property
    def found(self) -> tuple[tuple[str, str], ...]:
        """(what, file:line) of each."""
        return tuple(self._found.items())

    def restart(self, folder: str) -> None:
        """Watch for another run, of files in ``folder``."""
        self._folder = os.path.realpath(folder)
        self._found.clear()
        self.generators.clear()

    def install(self) -> None:
        """Watch from now on, to the end of the process."""
        self._keep_generators(np.random, "default_rng")
        self._wrap(np.random, "default_rng", "numpy.random.default_rng() without a seed", _is_unseeded)
        self._wrap(np.random, "RandomState", "numpy.random.RandomState() without a seed", _is_unseeded)
        self._wrap(random, "seed", "random.seed() without a seed", _is_unseeded)
        self._wrap(random, "SystemRandom", "random.SystemRandom", lambda *_: True)
        self._wrap(torch, "seed", "torch.seed(), which draws one", lambda *_: True)
        for name in ("time", "time_ns"):
            self._wrap(time, name, f"time.{name}()", lambda *_: True)
        self._wrap(os, "urandom", "os.urandom()", lambda *_: True)
        # An audit hook also sees what libraries and C code look up.
        sys.addaudithook(self._audit)
        torch.Generator = watched_generator_class(  # type: ignore[misc]
            lambda generator, frame: self._note_generator(generator, "torch.Generator()", frame),
            self.generators.seeded,
        )

    def _keep_generators(self, owner: object, name: str) -> None:
        make, note = getattr(owner, name), self._note_generator

        def kept(*args: object, **kwargs: object) -> object:
            generator = make(*args, **kwargs)
            # This goes behind what watches for seeds.
            note(generator, f"numpy.random.{name}()", sys._getframe(2))
            return generator

        setattr(owner, name, kept)

    def _note_generator(self, generator: object, what: str, frame: FrameType) -> None:
        path = frame.f_code.co_filename
        if self._is_own(path):
            self.generators.add(generator, what, f"{os.path.basename(path)}:{frame.f_lineno}")

    def _wrap(self, owner: object, name: str, what: str, counts: Callable[..., bool]) -> None:
        function = getattr(owner, name)
        # It stays a class, for isinstance.
        if isinstance(function, type):
            return
        note = self._note_source

        def watched(*args: object, **kwargs: object) -> object:
            if counts(args, kwargs):
                note(what, sys._getframe(1))
            return function(*args, **kwargs)

        setattr(owner, name, watched)

    def _audit(self, event: str, args: object) -> None:
        if event == "socket.getaddrinfo" and "the network" not in self._found:
            self._note_source("the network", sys._getframe(1))

    def _note_source(self, what: str, frame: FrameType | None) -> None:
        while frame is not None:
            path = frame.f_code.co_filename
            if self._is_own(path):
                self._found.setdefault(what, f"{os.path.basename(path)}:{frame.f_lineno}")
                return
            if what != "the network":
                # What a library uses for itself does no harm.
                return
            frame = frame.f_back

    def _is_own(self, path: str) -> bool:
        path = os.path.realpath(path)
        return path.startswith(self._folder + os.sep) and "site-packages" not in path


def _is_unseeded(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    values = [*args, *kwargs.values()]
    return not values or values[0] is None
