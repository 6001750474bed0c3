"""What a script draws or reads that another run of it does not: generators without a seed, the time, the network."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import torch

from lockstep.parity.collect.own_generators import OwnGenerators, watched_generator_class


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
        sys.addaudithook(self._audit)
        torch.Generator = watched_generator_class(  # type: ignore[misc]
            lambda generator, frame: self._note_generator(generator, "torch.Generator()", frame),
            self.generators.seeded,
        )

    def _keep_generators(self, owner: object, name: str) -> None:
        make, note = getattr(owner, name), self._note_generator

        def kept(*args: object, **kwargs: object) -> Any:
            generator = make(*args, **kwargs)
            note(generator, f"numpy.random.{name}()", sys._getframe(2))  # behind what watches for seeds
            return generator

        setattr(owner, name, kept)

    def _note_generator(self, generator: object, what: str, frame: FrameType) -> None:
        path = frame.f_code.co_filename
        if self._is_own(path):
            self.generators.add(generator, what, f"{os.path.basename(path)}:{frame.f_lineno}")

    def _wrap(self, owner: object, name: str, what: str, counts: Callable[..., bool]) -> None:
        function = getattr(owner, name)
        if isinstance(function, type):  # stays a class, for isinstance
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
                return  # a library's own use does no harm
            frame = frame.f_back

    def _is_own(self, path: str) -> bool:
        path = os.path.realpath(path)
        return path.startswith(self._folder + os.sep) and "site-packages" not in path


def _is_unseeded(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    values = [*args, *kwargs.values()]
    return not values or values[0] is None
