"""What a forward changes beside its result: buffers, and plain attributes of modules.

A forward that runs once for each micro-batch would count a step several times. So every micro-batch begins with the
state from before the batch, and what they all leave is kept: once a step. What they leave differently follows the rows,
which no micro-batch has all of.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.comm.dtensor import local
from lockstep.model.blocks import joined_name
from lockstep.model.contents import is_container, is_ours, is_plain, saved_attributes, set_contents
from lockstep.parallel.pipeline.absent import is_placeholder
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals import tensors as torch_tensors

_PLAIN = (bool, int, float, str)
_ABSENT = object()


@dataclass
class Entry:
    """A buffer or an attribute, under ``name`` in the model: where it is, and what it was."""

    name: str
    is_buffer: bool
    entries: dict[str, object]
    key: str
    value: object
    copy: object
    # What the first micro-batch that changed it left.
    after: object = _ABSENT
    # Whether others left something else.
    differs: bool = False
    # What the micro-batch that runs has found.
    begun: object = None
    version: int = 0

    @property
    def kind(self) -> str:
        return "buffer" if self.is_buffer else "attribute"

    def begin(self) -> None:
        """Let a micro-batch find what there was; autograd may have saved what the one before it wrote to."""
        # A clone each time: the backward of the micro-batch before may need the values that its forward has saved.
        if isinstance(self.copy, Tensor):
            self.begun = self.copy.clone()
            self.version = torch_tensors.version(self.begun)
        elif is_container(self.copy):
            set_contents(self.value, copy.deepcopy(self.copy))
            self.begun = self.value
        else:
            self.begun = self.copy
        self.entries[self.key] = self.begun

    def end(self) -> None:
        """Note what a micro-batch left."""
        now = self.entries.get(self.key)
        # A write with equal values counts too. Otherwise a statistic that a first batch leaves as it was would be lost.
        if (_equal_values(now, self.copy) and not self._is_written(now)) or (
            is_container(now) and not is_plain(now)
        ):
            # Nothing was changed, or tensors were noted.
            return
        if self.after is _ABSENT:
            self.after = _copied(now)
        elif not _equal_values(now, self.after):
            self.differs = True

    def _is_written(self, now: object) -> bool:
        """Return whether it was written, also with the same values: a running average of what has not changed yet."""
        return isinstance(now, Tensor) and now is self.begun and torch_tensors.version(now) != self.version

    @torch.no_grad()
    def put(self, value: object) -> None:
        """Let the entry be ``value``, in the tensor or container that it was."""
        # In place: optimizers, hooks and other modules may refer to the same tensor or container.
        if is_container(value) and is_container(self.value):
            set_contents(self.value, copy.deepcopy(value))
            value = self.value
        if (
            isinstance(value, Tensor)
            and isinstance(self.value, Tensor)
            and _has_same_layout(value, self.value)
        ):
            if not _equal_values(value, self.value):
                self.value.copy_(value)
            value = self.value
        self.entries[self.key] = value


def entries_of(
    modules: Iterable[tuple[str, nn.Module]],
    wanted: Callable[[dict[str, object], str, str], bool] | None = None,
) -> Iterator[Entry]:
    """Yield the entries of modules by name; those of this package keep their own state right.

    ``wanted(entries, key, name)``: which; otherwise all.
    """
    for name, module in modules:
        if is_ours(module):
            continue
        prefix = f"{name}." if name else ""
        buffers = torch_modules.buffers_of(module)
        for key, value in buffers.items():
            if isinstance(value, Tensor) and (wanted is None or wanted(buffers, key, f"{prefix}{key}")):
                yield Entry(f"{prefix}{key}", True, buffers, key, value, _copied(value))
        for key, value in vars(module).items():
            if key in torch_modules.OWN_ATTRIBUTES:
                continue
            if wanted is not None and not wanted(vars(module), key, f"{prefix}{key}"):
                continue
            if isinstance(value, (*_PLAIN, Tensor)) and not is_placeholder(value):
                yield Entry(f"{prefix}{key}", False, vars(module), key, value, _copied(value))
            elif is_container(value) and is_plain(value):
                yield Entry(f"{prefix}{key}", False, vars(module), key, value, copy.deepcopy(value))


class ForwardState:
    """What changes in the forwards of this rank. A batch that is to ``find`` it comes first; then each begins and ends.

    ``gather_from_ranks`` gathers what each rank says, ranks of later stages last.
    """

    def __init__(
        self, gather_from_ranks: Callable[[dict[str, object]], list[dict[str, object]]] = lambda mine: [mine]
    ) -> None:
        self._gather_from_ranks = gather_from_ranks
        self._names: set[tuple[int, str]] = set()
        self._shared: set[str] = set()
        self._frozen: dict[str, tuple[nn.Parameter, int]] = {}
        self._entries: list[Entry] = []

    @property
    def is_used(self) -> bool:
        """Whether forwards change anything."""
        return bool(self._names or self._shared)

    def changed(self) -> list[str]:
        """Return the names of what the forwards of this batch have changed so far."""
        return [entry.name for entry in self._entries if entry.after is not _ABSENT]

    def follows_rows(self) -> tuple[str, str] | None:
        """Return (kind, name) of what micro-batches left differently, or of a frozen parameter that they changed."""
        for name, (parameter, version) in self._frozen.items():
            if torch_tensors.version(local(parameter)) != version:
                return "parameter", name
        return next(((entry.kind, entry.name) for entry in self._entries if entry.differs), None)

    def share(self, names: Iterable[str]) -> None:
        """Share the modules of these names' owners, which are on all ranks: what one rank's stages change there, all
        ranks get."""
        self._shared |= set(names)

    def begin_batch(self, modules: Iterable[tuple[str, nn.Module]], find: bool = False) -> None:
        """Begin a batch; ``find``: look at everything, else at what was found to change."""
        modules = list(modules)
        self._frozen = {
            joined_name(prefix, name): (parameter, torch_tensors.version(local(parameter)))
            for prefix, module in (modules if find else ())
            for name, parameter in torch_modules.parameters_of(module).items()
            if parameter is not None and not parameter.requires_grad
        }
        self._entries = list(entries_of(modules, None if find else self._is_state))

    def _is_state(self, entries: dict[str, object], key: str, name: str) -> bool:
        return (id(entries), key) in self._names or name in self._shared

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Surround one forward of a stage."""
        for entry in self._entries:
            entry.begin()
        try:
            yield
        finally:
            for entry in self._entries:
                entry.end()

    def end_batch(self) -> None:
        """Keep what the micro-batches left. Collective, if something is shared."""
        if self._shared:
            self._take_from_others()
        for entry in self._entries:
            entry.put(entry.copy if entry.after is _ABSENT else entry.after)
        self._entries = []

    def _take_from_others(self) -> None:
        mine = {e.name: e.after for e in self._entries if e.name in self._shared and e.after is not _ABSENT}
        # Later stages overwrite earlier ones, as their forwards run later.
        left = {name: value for of_rank in self._gather_from_ranks(mine) for name, value in of_rank.items()}
        for entry in self._entries:
            if entry.name in left:
                entry.after = left[entry.name]

    def forget_batch(self) -> None:
        """Put everything back, and remember what changed."""
        # From now on only these are looked at, because looking at everything would cost each batch a copy of all
        # buffers.
        self._names |= {(id(e.entries), e.key) for e in self._entries if e.after is not _ABSENT}
        for entry in self._entries:
            entry.put(entry.copy)
        self._entries, self._frozen = [], {}


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
    """Put back what forwards inside change."""
    modules = list(modules)
    entries = list(entries_of(modules))
    restore_objects = saved_attributes(module for _, module in modules if not is_ours(module))
    known = {id(module): set(vars(module)) for _, module in modules}
    nones = [
        (vars(module), key) for _, module in modules for key, value in vars(module).items() if value is None
    ]
    try:
        yield
    finally:
        for entry in entries:
            entry.put(entry.copy)
        restore_objects()
        for attributes, key in nones:
            attributes[key] = None
        for _, module in modules:
            # Attributes that the forward has added.
            for key in set(vars(module)) - known[id(module)]:
                del vars(module)[key]


def _copied(value: object) -> object:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _has_same_layout(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _equal_values(a: object, b: object) -> bool:
    if is_placeholder(a) or is_placeholder(b):
        # What was noted of another stage's tensor has no value here.
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if not _has_same_layout(a, b):
            return False
        # Two NaN count as equal.
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return bool(a == b or (a != a and b != b))
