"""Tensors that one stage makes and a later one uses although they are no argument of the block between them.

Auxiliary losses that are added up, lists of blocks' outputs, long skips, notes that blocks keep on themselves. The
trace of a model shows which ones there are (``Values``): where they come from, and in which order a stage uses them.
They travel with the messages between stages, and a stage's forward finds them where it uses them (``Exchange``).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep.comm.tree import Args, Kwargs, leaves, map_leaves, tensor_leaves
from lockstep.errors import UsageError
from lockstep.model.changes import attributes_set
from lockstep.parallel.pipeline.absent import carried, is_placeholder
from lockstep.parallel.pipeline.traced import Fetch, Source
from lockstep.torch_internals import tensors as torch_tensors
from lockstep.torch_internals.dispatch import TorchFunction

ITSELF = "itself"
OUTPUT = "the output of the model"
_TENSOR_PROPERTIES = {"data", "grad", "T", "mT", "H", "mH", "real", "imag"}
_ABOUT_TENSORS = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "type"),
    *("is_floating_point", "is_complex", "is_contiguous", "__len__", "__hash__", "get_device", "__repr__"),
    *("requires_grad_", "retain_grad", "is_signed", "is_same_size", "data_ptr"),
    *("has_names", "is_conj", "is_neg"),
}


@dataclass(eq=False)
class CarriedTensor:
    """A tensor that an earlier stage than the present one made, in the trace."""

    segment: int
    source: Source
    made: Tensor
    # segment -> what stands for it there
    seen: dict[int, Tensor] = field(default_factory=dict)
    # segment -> path in the call of its first block
    arrives: dict[int, str] = field(default_factory=dict)

    def before(self, segment: int) -> Tensor:
        """Return what stands for it in the latest segment before this one."""
        return next((self.seen[s] for s in range(segment - 1, -1, -1) if s in self.seen), self.made)


def name_of(function: object) -> str:
    """Return the same for each call of a function of torch."""
    return str(getattr(function, "__name__", function))


def calling(block: str) -> str:
    """Return what a block's call is named where it uses something."""
    return f"the call of '{block}'"


def changed_by(name: str, args: Args, kwargs: Kwargs) -> Tensor | None:
    """Return the real tensor that a function changes by what another stage has: total += aux, outs[0] = x."""
    in_place = name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and name[-2:] != "__")
    target = kwargs.get("out", args[0] if in_place and args else None)
    if not isinstance(target, Tensor) or is_placeholder(target):
        return None
    return target if has_placeholder(args) or has_placeholder(kwargs.values()) else None


def is_about(function: TorchFunction) -> bool:
    """Return whether a function asks for a tensor's shape, type and so on, not for its values."""
    name = name_of(function)
    if name == "__get__":
        return name_of(getattr(function, "__self__", None)) not in _TENSOR_PROPERTIES
    return name in _ABOUT_TENSORS or name == "__set__"


class Values(TorchFunctionMode):
    """Follows tensors from where they are made to the segments that use them, while a model is traced.

    Args:
        now: The segment that runs.
        birth: The segment that made a tensor; None: every stage has it.
        new: Makes a placeholder that is born now.
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
        self._of: dict[int, CarriedTensor] = {}
        # id -> the tensor, and what stands for it now
        self._instead: dict[int, tuple[Tensor, Tensor]] = {}
        self._alive: list[object] = []
        self._counts: Counter[str] = Counter()
        self._block = ""
        self._is_inside = False
        self._is_paused = False
        # The first segment that changes a real tensor.
        self.first_change = sys.maxsize
        # Real tensors that have become another stage's.
        self._changed: dict[int, Tensor] = {}
        self._used: list[CarriedTensor] = []
        self._order: dict[int, list[tuple[CarriedTensor, str, Tensor]]] = {}
        # Segments that use something within a block.
        self.within: set[int] = set()
        # Segments in which functions get something else than they are called with.
        self.between: set[int] = set()

    def paused(self, is_paused: bool = True) -> AbstractContextManager[None]:
        """Leave out what is computed inside: it is not of the model."""
        return attributes_set(self, _is_paused=is_paused)

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if self._is_paused or is_about(func):
            return func(*args, **kwargs)
        name = name_of(func)
        given = leaves((args, kwargs))
        # The function gets what stands for each tensor in the segment that runs, not what an earlier one made.
        present = {path: self.here(leaf, name) for path, leaf in given.items()}
        if any(present[path] is not leaf for path, leaf in given.items()):
            self.between.add(self._now())
            if self._is_inside:
                self.within.add(self._now())
            args, kwargs = map_leaves(lambda path, _: present[path], (args, kwargs))
        changed = changed_by(name, args, kwargs)
        if changed is not None:
            args, kwargs = self._taken(changed, args, kwargs)
        out = func(*args, **kwargs)
        # Within a block only what it returns or keeps can be named for another stage; see ``returned``.
        if not self._is_inside:
            number = self._counts[name]
            self._counts[name] += 1
            if changed is not None:
                # From here on it is another value: what this function has left in it.
                instead = self._instead[id(changed)][1]
                self._of.pop(id(instead), None)
                self._note_source(instead, Source("function", self._block, ITSELF, name, number))
                self._of[id(changed)] = self._of[id(instead)]
            # What it returns unchanged, as to() may, keeps its source.
            passed_on = set(map(id, given.values()))
            for path, leaf in tensor_leaves(out).items():
                if id(leaf) not in passed_on:
                    self._note_source(leaf, Source("function", self._block, path, name, number))
        return out

    def _taken(self, changed: Tensor, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Return the arguments with a placeholder for a real tensor that only this stage changes from now on.

        Raises:
            UsageError: it is a view of another tensor, which would change too.
        """
        if torch_tensors.is_view(changed):
            raise UsageError(
                "The forward writes what blocks return into a view of a tensor that it made before, which a "
                "pipeline cannot follow. Write with an index (outputs[i] = x), or collect the tensors in a list "
                "and call torch.stack."
            )
        instead = self._new(changed)
        self._instead[id(changed)] = (changed, instead)
        self._changed[id(changed)] = changed
        self.first_change = min(self.first_change, self._now())
        return map_leaves(lambda _, leaf: instead if leaf is changed else leaf, (args, kwargs))

    def _note_source(self, tensor: Tensor, source: Source) -> None:
        if id(tensor) not in self._of:
            self._of[id(tensor)] = CarriedTensor(self._now(), source, tensor)
            self._alive.append(tensor)

    def within_a_block(self) -> AbstractContextManager[None]:
        """Know what a block makes inside only if it returns or keeps it."""
        return attributes_set(self, _is_inside=True)

    def returned(self, block: str, out: object) -> None:
        """Note what a block gives back."""
        self._block = block
        self._counts.clear()
        for path, leaf in tensor_leaves(out).items():
            self._note_source(leaf, Source("output", block, path))

    def arrived(self, leaf: Tensor, new: Tensor, path: str) -> None:
        """Let ``new`` stand for ``leaf`` from now on, as an argument of the first block of a segment."""
        value = self._value_of(leaf)
        if value is not None:
            value.arrives[self._now()] = path
            value.seen[self._now()] = new
            self._of[id(new)] = value
            self._alive.append(new)

    def _value_of(self, leaf: Tensor) -> CarriedTensor | None:
        for tensor in (self._instead.get(id(leaf), (leaf, leaf))[1], carried(leaf), leaf):
            if id(tensor) in self._of:
                return self._of[id(tensor)]
        # Neither returned nor made between blocks: a block may keep it as an attribute.
        place = self._attribute(leaf)
        birth = self._birth(leaf)
        if place is None or birth is None:
            return None
        self._of[id(leaf)] = CarriedTensor(birth, Source("attribute", *place), leaf)
        self._alive.append(leaf)
        return self._of[id(leaf)]

    def here(self, leaf: object, by: str) -> object:
        """Return ``leaf``, or what stands for it in this segment."""
        if not isinstance(leaf, Tensor):
            return leaf
        now = self._now()
        for tensor in (self._instead.get(id(leaf), (leaf, leaf))[1], carried(leaf)):
            if self._birth(tensor) == now:
                return tensor
        # Every stage has it.
        if self._birth(leaf) is None and id(leaf) not in self._changed:
            return carried(leaf)
        value = self._value_of(leaf) if is_placeholder(leaf) or id(leaf) in self._changed else None
        if value is None:
            # It cannot be sent; an operation that uses it says so.
            return carried(leaf)
        new = value.seen.get(now)
        if new is None:
            new = self._new(value.before(now))
            if new.requires_grad and torch.is_grad_enabled():
                # Not a leaf, because it may be changed in place.
                new = new.clone()
            value.seen[now] = new
            self._of[id(new)] = value
            self._alive.append(new)
        self._instead[id(leaf)] = (leaf, new)
        if value not in self._used:
            self._used.append(value)
        self._order.setdefault(now, []).append((value, by, leaf))
        return new

    def messages(self, segment: int) -> list[CarriedTensor]:
        """Return what comes into a segment beside the arguments of its first block."""
        return [
            value
            for value in self._used
            # It passes through every segment from the one that made it to the last one that uses it.
            if value.segment < segment <= max(value.seen) and segment not in value.arrives
        ]

    def sources(self, segment: int, paths: Sequence[str]) -> tuple[Source, ...]:
        """Return where the segment before finds ``messages(segment)``; ``paths``: of the arguments that it received
        itself."""
        before = self.messages(segment - 1)

        def source(value: CarriedTensor) -> Source:
            if value.segment == segment - 1:
                return value.source
            return Source("received", number=_message_index(value, segment - 1, before, paths))

        return tuple(source(value) for value in self.messages(segment))

    def fetches(self, segment: int, paths: Sequence[str]) -> tuple[Fetch, ...]:
        """Return the order in which a segment uses what it received."""
        messages = self.messages(segment)
        return tuple(
            Fetch(_message_index(value, segment, messages, paths), by, leaf.ndim, leaf.dtype)
            for value, by, leaf in self._order.get(segment, ())
        )


def _message_index(
    value: CarriedTensor, segment: int, messages: Sequence[CarriedTensor], paths: Sequence[str]
) -> int:
    if segment in value.arrives:
        return list(paths).index(value.arrives[segment])
    return len(paths) + list(messages).index(value)


def has_placeholder(given: Iterable[object]) -> bool:
    """Return whether there is one among the values, or in the lists, tuples and dicts among them."""
    return any(
        has_placeholder(one.values() if isinstance(one, dict) else one)
        if isinstance(one, (list, tuple, dict))
        else is_placeholder(one)
        for one in given
    )
