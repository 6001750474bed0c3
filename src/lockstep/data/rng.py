"""Random number generators with a private state: of an epoch, of a stream, of a worker's batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
import torch

from lockstep.errors import CheckpointError

T = TypeVar("T")


def epoch_seed(seed: int, epoch: int) -> int:
    """Return ``seed + epoch``, as torch's ``DistributedSampler`` adds them, within what a generator accepts."""
    return (seed + epoch) % 2**64


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return a CPU generator in the state that begins an epoch."""
    return torch.Generator(device="cpu").manual_seed(epoch_seed(seed, epoch))


def mixed_seed(*key: int) -> int:
    """Mix 64 bits that depend on each number of ``key``, in its place."""
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
    # A chain hands on the items without a call of Python code for each.
    return chain.from_iterable(_private_blocks(items, seed, block_size, device))


def _private_blocks(items: Iterable[T], seed: int, block_size: int, device: str | None) -> Iterator[list[T]]:
    draws = PrivateDraws(Generators(), _seeded_states(seed))
    source: Iterator[T] | None = None
    while True:
        # Samplers call torch.randperm without a device; the order must not depend on the default one.
        with draws.hidden(), _default_device(device):
            source = iter(items) if source is None else source
            block = list(islice(source, block_size))
        yield block
        if len(block) < block_size:
            return


States = list[Any]
"""States of torch's, Python's and NumPy's global generator, then of a loader's own ones."""


class Generators:
    """The generators that a loader may draw from: the global ones on the CPU, and ``own``, which it holds."""

    def __init__(self, own: Iterable[torch.Generator] = ()) -> None:
        self.own = tuple(own)

    def read(self) -> States:
        own = [generator.get_state() for generator in self.own]
        return [torch.get_rng_state(), random.getstate(), np.random.get_state(), *own]

    def write(self, states: States) -> None:
        for write, state in zip(self._writers(), states, strict=True):
            write(state)

    def change(self, now: States, states: States) -> None:
        """Move the generators from ``now``, where they stand, to ``states``. To compare a state is quicker than to
        write it."""
        for write, old, new in zip(self._writers(), now, states, strict=True):
            if not same_state(old, new):
                write(new)

    def _writers(self) -> list[Callable[[Any], object]]:
        own = [generator.set_state for generator in self.own]
        return [torch.set_rng_state, random.setstate, np.random.set_state, *own]

    @contextmanager
    def at(self, states: States) -> Iterator[None]:
        """Put the generators at ``states`` inside of the block; afterwards they stand where they stood before."""
        before = self.read()
        self.write(states)
        try:
            yield
        finally:
            self.write(before)


class PrivateDraws:
    """Numbers drawn from copies of ``generators``, which begin at ``states``.

    The generators themselves follow, each as long as nobody else draws from it: so they end where drawing from them
    would have led, and whoever else draws does not change what is drawn here.
    """

    def __init__(self, generators: Generators, states: States) -> None:
        self.generators = generators
        self.states = states
        self.shown = states
        self._is_drawing = False

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Draw inside; the generators stay where they are."""
        if self._is_drawing:
            yield
            return
        self._is_drawing = True
        try:
            before = self.generators.read()
            self.generators.change(before, self.states)
            try:
                yield
            finally:
                now = self.generators.read()
                if not all(map(same_state, now, self.states)):
                    self.states = now
                self.generators.change(now, before)
        finally:
            self._is_drawing = False

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Draw inside; afterwards the generators follow."""
        is_inner = self._is_drawing
        with self.hidden():
            yield
        if not is_inner:
            self.show(self.states)

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Follow the generators where torch's loader begins an iteration and draws a seed for its workers.

        A process whose global generator stands elsewhere, because the script has seeded each process for itself, draws
        one number as well: so it goes on with those that it would draw behind a plain loader.
        """
        before, stands_elsewhere = self.states, not torch.equal(torch.get_rng_state(), self.shown[0])
        with self.followed():
            yield
        if stands_elsewhere and not torch.equal(before[0], self.states[0]):
            torch.empty((), dtype=torch.int64).random_()

    def show(self, states: States) -> None:
        """Bring those generators to ``states`` that are where the last call of this has brought them."""
        if states is self.shown:
            return
        now = self.generators.read()
        follow = [
            new if same_state(own, old) else own
            for own, old, new in zip(now, self.shown, states, strict=True)
        ]
        self.generators.write(follow)
        self.shown = states


def same_state(one: Any, other: Any) -> bool:
    """Return whether two states of one generator are equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one[1], np.ndarray):
        return bool(np.array_equal(one[1], other[1])) and one[2:] == other[2:]
    return bool(one == other)


def plain_states(states: States) -> dict[str, object]:
    """Return ``states`` as tensors and plain values; ``states_of`` reads them."""
    version, words, gauss = states[1]
    # (kind, words, position, has_gauss, cached_gaussian)
    numpy_kind, numpy_words, *numpy_rest = states[2]
    plain = {
        "torch": states[0],
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "kind": numpy_kind,
            "words": torch.from_numpy(numpy_words.astype(np.int64)),
            "rest": [int(numpy_rest[0]), int(numpy_rest[1]), float(numpy_rest[2])],
        },
    }
    return plain | ({"own": states[3:]} if states[3:] else {})


def states_of(plain: Mapping[str, Any]) -> States:
    """Return the states that ``plain_states`` wrote.

    Raises:
        CheckpointError: they are not states of generators.
    """
    try:
        python, numpy_state = plain["python"], plain["numpy"]
        words = numpy_state["words"].numpy().astype(np.uint32)
        states = [
            plain["torch"],
            (python["version"], tuple(python["words"].tolist()), python["gauss"]),
            (numpy_state["kind"], words, *numpy_state["rest"]),
        ]
        # Generators of no use take them first: what they refuse must not change the run.
        random.Random().setstate(states[1])
        np.random.RandomState().set_state(states[2])
        own = list(plain.get("own", ()))
        for state in (states[0], *own):
            torch.Generator().set_state(state)
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        IndexError,
        OverflowError,
    ) as error:
        raise CheckpointError(
            f"The state of a loader holds a state of random number generators that is not valid ({error}). Pass "
            "what state_dict() returned, unchanged."
        ) from error
    return [*states, *own]


@contextmanager
def _default_device(device: str | None) -> Iterator[None]:
    if device is None:
        yield
        return
    with torch.device(device):
        yield


def _seeded_states(seed: int) -> States:
    return [
        torch.Generator(device="cpu").manual_seed(seed).get_state(),
        random.Random(seed).getstate(),
        np.random.RandomState(seed % 2**32).get_state(),
    ]
