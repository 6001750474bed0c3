"""What a forward changes beside its result: buffers, and plain attributes of modules.

A forward that runs once for each micro-batch would count a step several times. So every micro-batch begins with the
state from before the batch, and what they all leave is kept: once a step. What they leave differently follows the rows,
which no micro-batch has all of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.parallel.pipeline.absent import is_stand_in
from lockstep.torch_internals import modules as torch_modules

_PLAIN = (bool, int, float, str)
_CONTAINERS: tuple[type, ...] = (list, dict, set)
_ABSENT = object()


@dataclass
class Entry:
    """A buffer or an attribute, under ``name`` in the model: where it is, and what it was."""

    name: str
    is_buffer: bool
    entries: dict[str, Any]
    key: str
    value: Any
    copy: Any
    after: Any = _ABSENT  # what the first micro-batch that changed it left
    differs: bool = False  # others left something else

    @property
    def kind(self) -> str:
        return "buffer" if self.is_buffer else "attribute"

    def begin(self) -> None:
        """Let a micro-batch find what there was; autograd may have saved what the one before it wrote to."""
        if isinstance(self.copy, Tensor):
            self.entries[self.key] = self.copy.clone()
        else:
            self.entries[self.key] = self.copy

    def end(self) -> None:
        """Note what a micro-batch left."""
        now = self.entries.get(self.key)
        if _same(now, self.copy):
            return
        if self.after is _ABSENT:
            self.after = _copied(now)
        elif not _same(now, self.after):
            self.differs = True

    @torch.no_grad()
    def put(self, value: Any) -> None:
        """Let the entry be ``value``, in the tensor that it was."""
        if isinstance(value, Tensor) and isinstance(self.value, Tensor) and _alike(value, self.value):
            if not _same(value, self.value):
                self.value.copy_(value)
            value = self.value
        self.entries[self.key] = value


def entries_of(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[Entry]:
    """Of modules by name; those of this package keep their own state right."""
    for name, module in modules:
        if type(module).__module__.startswith("lockstep."):
            continue
        prefix = f"{name}." if name else ""
        buffers = torch_modules.buffers_of(module)
        for key, value in buffers.items():
            if isinstance(value, Tensor):
                yield Entry(f"{prefix}{key}", True, buffers, key, value, _copied(value))
        for key, value in vars(module).items():
            if key in torch_modules.OWN_ATTRIBUTES:
                continue
            if isinstance(value, (*_PLAIN, Tensor)) and not is_stand_in(value):
                yield Entry(f"{prefix}{key}", False, vars(module), key, value, _copied(value))


class StepState:
    """What changes in the forwards of this rank. ``watch`` finds it, once; then each batch begins and ends."""

    def __init__(self) -> None:
        self._names: set[tuple[int, str]] = set()
        self._known: set[tuple[int, str]] | None = (
            None  # what there was before the first forward: the rest are notes
        )
        self._entries: list[Entry] = []

    @property
    def is_used(self) -> bool:
        """Whether forwards change anything."""
        return bool(self._names)

    def begin_batch(self, modules: Iterable[tuple[str, nn.Module]], find: bool = False) -> None:
        """``find``: look at everything, else at what was found to change."""
        self._entries = []
        if find or self._names:
            found = list(entries_of(modules))
            if self._known is None:
                self._known = {(id(e.entries), e.key) for e in found}
            wanted = self._known if find else self._names
            self._entries = [e for e in found if (id(e.entries), e.key) in wanted]

    @contextmanager
    def micro_batch(self, note: bool = True) -> Iterator[None]:
        """Around one forward of a stage. ``note``: what it leaves counts."""
        for entry in self._entries:
            entry.begin()
        try:
            yield
        finally:
            for entry in self._entries if note else ():
                entry.end()

    def differing(self) -> Entry | None:
        """Something that micro-batches left differently."""
        return next((entry for entry in self._entries if entry.differs), None)

    @contextmanager
    def without_differences(self, drop: Callable[[], bool]) -> Iterator[None]:
        """If ``drop()`` holds at the end, what differed inside for the first time is not held against a batch."""
        before = [entry.differs for entry in self._entries]
        yield
        if drop():
            for entry, differed in zip(self._entries, before, strict=True):
                entry.differs = differed

    def end_batch(self) -> None:
        """Keep what the micro-batches left."""
        for entry in self._entries:
            entry.put(entry.copy if entry.after is _ABSENT else entry.after)
        self._entries = []

    def forget_batch(self) -> None:
        """Put everything back, and remember what changed."""
        self._names |= {(id(e.entries), e.key) for e in self._entries if e.after is not _ABSENT}
        for entry in self._entries:
            entry.put(entry.copy)
        self._entries = []


@contextmanager
def restored(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """Values that modules have get back what they were; those that forwards inside add are left."""
    entries = list(entries_of(modules))
    try:
        yield
    finally:
        for entry in entries:
            entry.put(entry.copy)


@contextmanager
def untouched(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """What forwards inside change is put back."""
    modules = list(modules)
    entries = list(entries_of(modules))
    containers = [
        (vars(module), key, value, value.copy())
        for _, module in modules
        if not type(module).__module__.startswith("lockstep.")
        for key, value in vars(module).items()
        if key not in torch_modules.OWN_ATTRIBUTES and type(value) in _CONTAINERS
    ]
    known = {id(module): set(vars(module)) for _, module in modules}
    nones = [
        (vars(module), key) for _, module in modules for key, value in vars(module).items() if value is None
    ]
    try:
        yield
    finally:
        for entry in entries:
            entry.put(entry.copy)
        for held, key, value, before in containers:
            if value != before if not _has_tensors(value, before) else True:
                value.clear()
                value.update(before) if isinstance(value, (dict, set)) else value.extend(before)
            held[key] = value
        for held, key in nones:
            held[key] = None
        for _, module in modules:
            for key in set(vars(module)) - known[id(module)]:
                del vars(module)[key]


@contextmanager
def untouched_generators(device: torch.device) -> Iterator[None]:
    """Random numbers are as before afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def _has_tensors(*containers: Any) -> bool:
    return any(
        isinstance(item, Tensor)
        for container in containers
        for item in (container.values() if isinstance(container, dict) else container)
    )


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _same(a: Any, b: Any) -> bool:
    if is_stand_in(a) or is_stand_in(b):
        return True  # noted of another stage's: it has no value here
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if not _alike(a, b):
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return bool(a == b or (a != a and b != b))
