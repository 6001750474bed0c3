"""Tensors that one stage makes and a later one uses although they are no argument of the block between them.

Auxiliary losses that are added up, lists of blocks' outputs, long skips, notes that blocks keep on themselves. The
trace of a model shows which ones there are (``Values``): where they come from, and in which order a stage uses them.
They travel with the messages between stages, and a stage's forward finds them where it uses them (``Exchange``).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.comm.tree import leaves, map_leaves
from lockstep.errors import UsageError
from lockstep.parallel.pipeline.absent import carried, is_stand_in
from lockstep.parallel.pipeline.replay import Replays
from lockstep.torch_internals import tensors as torch_tensors

ITSELF = "itself"
OUTPUT = "the output of the model"
_TENSOR_PROPERTIES = {"data", "grad", "T", "mT", "H", "mH", "real", "imag"}
_ABOUT_TENSORS = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "type"),
    *("is_floating_point", "is_complex", "is_contiguous", "__len__", "__hash__", "get_device", "__repr__"),
    *(
        "requires_grad_",
        "retain_grad",
        "is_signed",
        "is_same_size",
        "data_ptr",
        "has_names",
        "is_conj",
        "is_neg",
    ),
}


@dataclass(frozen=True)
class Source:
    """Where the stage before a cut finds what is sent: in what a block returns (``path``), in an attribute (``path``)
    of the module ``name``, in what a function made behind the block ``name``, or among what it received.

    ``path``: the leaf, or the name of the attribute; ``number``: the call of the function, or the place among what was
    received.
    """

    kind: Literal["output", "attribute", "function", "received"]
    name: str = ""
    path: str = ""
    function: str = ""
    number: int = 0

    def __str__(self) -> str:
        if self.kind == "output":
            return f"what the block '{self.name}' returns" + (f" at {self.path}" if self.path else "")
        if self.kind == "attribute":
            return f"the attribute '{self.name}.{self.path}'"
        where = f"behind the block '{self.name}'" if self.name else "before the blocks"
        return f"the result of {self.function} {where}"


@dataclass(frozen=True)
class Fetch:
    """The first use of a received tensor in a stage: its number among what is received, and which function uses it."""

    number: int
    by: str
    ndim: int
    dtype: torch.dtype


@dataclass(eq=False)
class Value:
    """A tensor that an earlier stage than the present one made, in the trace."""

    segment: int
    source: Source
    made: Tensor
    seen: dict[int, Tensor] = field(default_factory=dict)  # segment -> what stands for it there
    arrives: dict[int, str] = field(default_factory=dict)  # segment -> path in the call of its first block

    def before(self, segment: int) -> Tensor:
        """What stands for it in the latest segment before this one."""
        return next((self.seen[s] for s in range(segment - 1, -1, -1) if s in self.seen), self.made)


def name_of(function: Any) -> str:
    """The same for each call of a function of torch."""
    return str(getattr(function, "__name__", function))


def calling(block: str) -> str:
    """What a block's call is named where it uses something."""
    return f"the call of '{block}'"


def changed_by(name: str, args: Any, kwargs: Any) -> Tensor | None:
    """The real tensor that a function changes by what another stage has: total += aux, outs[0] = x."""
    in_place = name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and name[-2:] != "__")
    target = kwargs.get("out", args[0] if in_place and args else None)
    if not isinstance(target, Tensor) or is_stand_in(target):
        return None
    return target if _has_stand_in(args) or _has_stand_in(kwargs.values()) else None


def is_about(function: Any) -> bool:
    """Whether a function asks for a tensor's shape, type and so on, not for its values."""
    name = name_of(function)
    if name == "__get__":
        return name_of(getattr(function, "__self__", None)) not in _TENSOR_PROPERTIES
    return name in _ABOUT_TENSORS or name == "__set__"


class Values(TorchFunctionMode):
    """Follows tensors from where they are made to the segments that use them, while a model is traced.

    Args:
        now: The segment that runs.
        birth: The segment that made a tensor; None: every stage has it.
        new: Makes a stand-in that is born now.
        attribute: (name of a module of a block, attribute) that is this tensor.
    """

    def __init__(
        self,
        now: Callable[[], int],
        birth: Callable[[Tensor], int | None],
        new: Callable[[Tensor], Tensor],
        attribute: Callable[[Tensor], tuple[str, str] | None],
    ) -> None:
        super().__init__()
        self._now, self._birth, self._new, self._attribute = now, birth, new, attribute
        self._of: dict[int, Value] = {}
        self._instead: dict[int, tuple[Tensor, Tensor]] = {}  # id -> it, and what stands for it now
        self._alive: list[Any] = []
        self._counts: Counter[str] = Counter()
        self._block = ""
        self._inside = 0
        self._is_paused = False
        self.first_change = sys.maxsize  # the first segment that changes a real tensor
        self._changed: dict[int, Tensor] = {}  # real tensors that have become another stage's
        self._used: list[Value] = []
        self._order: dict[int, list[tuple[Value, str, Tensor]]] = {}
        self.replays: Replays | None = None  # is told what blocks make
        self.within: set[int] = set()  # segments that use something within a block
        self.between: set[int] = (
            set()
        )  # segments in which functions get something else than they are called with

    @contextmanager
    def paused(self, is_paused: bool = True) -> Iterator[None]:
        """What is computed inside is not of the model."""
        before, self._is_paused = self._is_paused, is_paused
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused or is_about(func):
            return func(*args, **kwargs)
        name = name_of(func)
        given = leaves((args, kwargs))
        present = {path: self.here(leaf, name) for path, leaf in given.items()}
        if any(present[path] is not leaf for path, leaf in given.items()):
            self.between.add(self._now())
            if self._inside:
                self.within.add(self._now())
            args, kwargs = map_leaves(lambda path, _: present[path], (args, kwargs))
        changed = changed_by(name, args, kwargs)
        if changed is not None:
            args, kwargs = self._taken(changed, args, kwargs)
        out = func(*args, **kwargs)
        if self._inside and self.replays is not None:
            self.replays.note(out)
        if not self._inside:
            number = self._counts[name]
            self._counts[name] += 1
            if changed is not None:
                instead = self._instead[id(changed)][1]
                self._of.pop(id(instead), None)
                self._note(instead, Source("function", self._block, ITSELF, name, number))
                self._of[id(changed)] = self._of[id(instead)]
            for path, leaf in leaves(out).items():
                if isinstance(leaf, Tensor):
                    self._note(leaf, Source("function", self._block, path, name, number))
        return out

    def _taken(self, changed: Tensor, args: Any, kwargs: Any) -> Any:
        """The arguments with a stand-in for a real tensor that is changed from now on by what only this stage has.

        Raises:
            UsageError: it is a view of another tensor, which would change too.
        """
        if torch_tensors.is_view(changed):
            raise UsageError(
                "The forward writes what blocks return into a view of a tensor that it made before, which a pipeline "
                "cannot follow. Write with an index (outputs[i] = x), or collect in a list and call torch.stack."
            )
        instead = self._new(changed)
        self._instead[id(changed)] = (changed, instead)
        self._changed[id(changed)] = changed
        self.first_change = min(self.first_change, self._now())
        return map_leaves(lambda _, leaf: instead if leaf is changed else leaf, (args, kwargs))

    def _note(self, tensor: Tensor, source: Source) -> None:
        if id(tensor) not in self._of:
            self._of[id(tensor)] = Value(self._now(), source, tensor)
            self._alive.append(tensor)

    @contextmanager
    def within_a_block(self) -> Iterator[None]:
        """What a block makes inside is known if it returns or keeps it."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def returned(self, block: str, out: Any) -> None:
        """Note what a block gives back."""
        self._block = block
        self._counts.clear()
        for path, leaf in leaves(out).items():
            if isinstance(leaf, Tensor):
                self._note(leaf, Source("output", block, path))

    def arrived(self, leaf: Tensor, new: Tensor, path: str) -> None:
        """``new`` stands for ``leaf`` from now on, as an argument of the first block of a segment."""
        value = self._value(leaf)
        if value is not None:
            value.arrives[self._now()] = path
            value.seen[self._now()] = new
            self._of[id(new)] = value
            self._alive.append(new)

    def _value(self, leaf: Tensor) -> Value | None:
        for tensor in (self._instead.get(id(leaf), (leaf, leaf))[1], carried(leaf), leaf):
            if id(tensor) in self._of:
                return self._of[id(tensor)]
        place = self._attribute(leaf)
        birth = self._birth(leaf)
        if place is None or birth is None:
            return None
        self._of[id(leaf)] = Value(birth, Source("attribute", *place), leaf)
        self._alive.append(leaf)
        return self._of[id(leaf)]

    def here(self, leaf: Any, by: str) -> Any:
        """``leaf``, or what stands for it in this segment."""
        if not isinstance(leaf, Tensor):
            return leaf
        now = self._now()
        for tensor in (self._instead.get(id(leaf), (leaf, leaf))[1], carried(leaf)):
            if self._birth(tensor) == now:
                return tensor
        if self._birth(leaf) is None and id(leaf) not in self._changed:  # every stage has it
            return carried(leaf)
        value = self._value(leaf) if is_stand_in(leaf) or id(leaf) in self._changed else None
        if value is None:
            return carried(leaf)  # an operation that uses it says so
        new = value.seen.get(now)
        if new is None:
            new = self._new(value.before(now))
            if new.requires_grad and torch.is_grad_enabled():
                new = new.clone()  # no leaf: it may be changed in place
            value.seen[now] = new
            self._of[id(new)] = value
            self._alive.append(new)
        self._instead[id(leaf)] = (leaf, new)
        if value not in self._used:
            self._used.append(value)
        self._order.setdefault(now, []).append((value, by, leaf))
        return new

    def messages(self, segment: int) -> list[Value]:
        """What comes into a segment beside the arguments of its first block."""
        return [
            value
            for value in self._used
            if value.segment < segment <= max(value.seen) and segment not in value.arrives
        ]

    def sources(self, segment: int, paths: Sequence[str]) -> tuple[Source, ...]:
        """Where the segment before finds ``messages(segment)``; ``paths``: of the arguments that it received itself."""
        before = self.messages(segment - 1)

        def source(value: Value) -> Source:
            if value.segment == segment - 1:
                return value.source
            return Source("received", number=_place(value, segment - 1, before, paths))

        return tuple(source(value) for value in self.messages(segment))

    def fetches(self, segment: int, paths: Sequence[str]) -> tuple[Fetch, ...]:
        """The order in which a segment uses what it received."""
        messages = self.messages(segment)
        return tuple(
            Fetch(_place(value, segment, messages, paths), by, leaf.ndim, leaf.dtype)
            for value, by, leaf in self._order.get(segment, ())
        )


def _place(value: Value, segment: int, messages: Sequence[Value], paths: Sequence[str]) -> int:
    if segment in value.arrives:
        return list(paths).index(value.arrives[segment])
    return len(paths) + list(messages).index(value)


class Exchange(TorchFunctionMode):
    """Within a stage's forward: uses what was received, and keeps what the next stage is sent.

    Args:
        fetches: What the stage uses, in order.
        sources: Where what it sends comes from.
        module: A module of this stage by name.
        within: Whether something is used within blocks.
    """

    def __init__(
        self,
        fetches: Sequence[Fetch],
        sources: Sequence[Source],
        module: Callable[[str], nn.Module],
        within: bool,
        is_first: bool,
        title: str,
    ) -> None:
        super().__init__()
        self._fetches, self._sources, self._module, self._title = fetches, sources, module, title
        self._within, self._is_first = within, is_first
        self._functions = {source.function for source in sources if source.kind == "function"}
        self._outputs = {source.name for source in sources if source.kind == "output"}
        self._wanted = {source for source in sources if source.kind in ("function", "output")}
        self.begin(())

    def begin(self, received: Sequence[Tensor]) -> None:
        """A forward begins, for which this was received."""
        self._received = received
        self._known: dict[int, tuple[Tensor, Tensor]] = {}
        self._changed: dict[int, Tensor] = {}  # real tensors that earlier stages have changed
        self._next = 0
        self._found: dict[Source, Tensor] = {}
        self._counts: Counter[str] = Counter()
        self._block = ""
        self._inside = 0
        self._is_own = self._is_first

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (self._inside and not self._within) or is_about(func):
            return func(*args, **kwargs)
        name = name_of(func)
        if not self._is_own:
            changed = changed_by(name, args, kwargs)
            if changed is None:
                return func(*args, **kwargs)
            self._changed[id(changed)] = changed  # what comes of it is received
            return None if name == "__setitem__" else changed
        if self._changed or _has_stand_in(args) or _has_stand_in(kwargs.values()):
            args, kwargs = map_leaves(lambda _, leaf: self.here(leaf, name), (args, kwargs))
        out = func(*args, **kwargs)
        if name in self._functions and not self._inside:
            number = self._counts[name]
            self._counts[name] += 1
            self._keep(out, "function", self._block, name, number)
            if (itself := Source("function", self._block, ITSELF, name, number)) in self._wanted:
                self._found[itself] = kwargs.get("out", args[0])
        return out

    def _keep(self, out: Any, kind: Any, block: str, function: str = "", number: int = 0) -> None:
        for path, leaf in leaves(out).items():
            source = Source(kind, block, path, function, number)
            if source in self._wanted:
                self._found[source] = leaf

    @contextmanager
    def calling(self, block: str, call: Any) -> Iterator[Any]:
        """Around a block's call: what it is called with, as far as it is known."""
        by = calling(block)
        self._is_own = True
        call = map_leaves(lambda _, leaf: self.here(leaf, by), call)
        self._inside += 1
        try:
            yield call
        finally:
            self._inside -= 1

    def result(self, output: Any) -> Any:
        """The output of the model.

        Raises:
            UsageError: something that was received was not used where the trace used it.
        """
        output = map_leaves(lambda _, leaf: self.here(leaf, OUTPUT), output)
        self.check_used()
        return output

    def returned(self, block: str, out: Any) -> None:
        """A block of this stage gave this back."""
        self._block = block
        self._counts.clear()
        if block in self._outputs:
            self._keep(out, "output", block)

    def here(self, leaf: Any, by: str) -> Any:
        """The real tensor for which ``leaf`` stands, if it is known."""
        if not is_stand_in(leaf) and id(leaf) not in self._changed:
            return leaf
        if id(leaf) in self._known:
            return self._known[id(leaf)][1]
        value = carried(leaf)
        if value is not leaf or self._next == len(self._fetches):
            return value
        fetch = self._fetches[self._next]
        if (fetch.by, fetch.ndim, fetch.dtype) != (by, leaf.ndim, leaf.dtype):
            return leaf
        self._next += 1
        value = self._received[fetch.number]
        self._known[id(leaf)] = (leaf, value)
        return value

    def check_used(self) -> None:
        """
        Raises:
            UsageError: something that was received was not used where the trace used it.
        """
        if self._next < len(self._fetches):
            raise UsageError(
                f"The forward of {self._title} does not use in {self._fetches[self._next].by} what an earlier stage of "
                "the pipeline sends for it, as it did without values. Collect what later code uses as results of "
                "blocks (x, aux = block(x)), not by hooks or in containers that blocks share."
            )

    def sent(self) -> list[Any]:
        """What goes to the next stage beside the arguments of its first block; None for what is missing."""
        return [self._one(source) for source in self._sources]

    def _one(self, source: Source) -> Any:
        if source.kind == "received":
            return self._received[source.number]
        if source.kind == "attribute":
            return getattr(self._module(source.name), source.path, None)
        return self._found.get(source)


def _has_stand_in(given: Any) -> bool:
    return any(
        _has_stand_in(one.values() if isinstance(one, dict) else one)
        if isinstance(one, (list, tuple, dict))
        else is_stand_in(one)
        for one in given
    )
