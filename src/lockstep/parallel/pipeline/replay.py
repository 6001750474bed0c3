"""Blocks that are equal to one that was traced, and are called alike, give what that one gave."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor, nn

from lockstep.comm.tree import Args, Kwargs, children, leaves, map_leaves, tensor_leaves
from lockstep.model.equal_modules import Unlike, describe, described, reading
from lockstep.parallel.pipeline.absent import is_placeholder
from lockstep.parallel.pipeline.traced import Argument, repeated, storage_of
from lockstep.torch_internals import tensors as torch_tensors
from lockstep.torch_internals.dispatch import TorchFunction

_PLAIN = (bool, int, float, str, type(None))
_CONSTANTS = (*_PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format)


class Replays:
    """While one call of a model is traced.

    A block is replayed only if all of it is known to be equal: what it holds, what it is called with, and the modes
    that it is called in. What leaves more behind than its output (notes on itself, changed arguments, tensors that
    somebody else has taken) is not replayed, nor is what uses a tensor of the model outside of blocks.

    Blocks that fill one of transformers' caches are each traced, and what they compute is noted (``operations``). Those
    that compute the same, operation by operation, have outputs of equal shapes for another number of rows, too.

    Args:
        is_known: Whether a storage belongs to a parameter outside of blocks, or to something that was computed.
        is_made: Whether a tensor was made by this segment.
        new: Makes a placeholder that this segment makes.
        kept: The tensors that the tracer itself keeps alive.
    """

    def __init__(
        self,
        is_known: Callable[[Tensor], bool],
        is_made: Callable[[Tensor], bool],
        new: Callable[[Tensor], Tensor],
        kept: list[Tensor],
    ) -> None:
        self._is_known, self._is_made = is_known, is_made
        self._new, self._kept = new, kept
        self._traced: dict[object, list[tuple[Mapping[tuple[type, str, str], object], tuple[object]]]] = {}
        self._alive: list[object] = []
        self.made: list[weakref.ref[Tensor]] | None = None
        self.count = 0
        self._operations: dict[str, Hashable] = {}
        # Storages of what blocks made that filled a cache.
        self._inside: set[int] = set()
        self._log: Operations | None = None

    def call(
        self,
        name: str,
        module: nn.Module,
        args: Args,
        kwargs: Kwargs,
        run: Callable[[nn.Module, Args, Kwargs], object],
    ) -> object:
        """What the block ``name`` returns; ``run(module, args, kwargs)`` traces it."""
        # Storages of what the block holds, views of which are computed in it.
        own: set[int] = set()

        def is_known(tensor: Tensor) -> bool:
            if self._is_known(tensor):
                return True
            own.add(storage_of(tensor))
            return False

        before = describe(module, is_known)
        given = leaves((args, kwargs))
        kinds = self._kinds_of(args, kwargs)
        # Something in it is like nothing else.
        if kinds != self._kinds_of(args, kwargs):
            return run(module, args, kwargs)
        caches = [leaf for leaf in given.values() if is_cache(leaf)]
        known = self._traced.setdefault((before.structure, kinds), [])
        for values, result in known:
            # In what their forwards never read, such as their number, blocks may differ.
            if all(before.values.get(key) == value for key, value in values.items()):
                self.count += 1
                return repeated(result[0], given, self._new)
        self.made = []
        self._log = Operations() if caches else None
        kinds_inside = set() if caches else {type(inner) for inner in module.modules()}
        with reading(kinds_inside) as reads:
            out = run(module, args, kwargs)
        after = describe(module, lambda tensor: storage_of(tensor) not in own and self._is_known(tensor))
        # It has changed neither itself nor its arguments.
        is_whole = before == after and kinds == self._kinds_of(args, kwargs)
        if is_whole and self._log is not None:
            self._operations[name] = before.structure, kinds, tuple(self._log.noted)
            self._remain_inside(out, given)
        elif is_whole and not self._has_escaped(out, given):
            kept = self._kept_of(out, given, own)
            if kept is not None:
                known.append((before.read(reads), kept))
        self.made = self._log = None
        return out

    def operation(self, function: TorchFunction, given: Mapping[str, object]) -> None:
        """An operation of torch, and the leaves of what it is called with."""
        if self._inside:
            self._check(given)
        if self._log is not None:
            self._log.note(function, given)

    def operations(self, output: object) -> dict[str, Hashable]:
        """After the forward, by block that filled a cache: what it computed. ``output``: of the model."""
        self._check(leaves(output))
        return self._operations

    def _remain_inside(self, out: object, given: Mapping[str, object]) -> None:
        """What was made and not returned is to be used by nobody else."""
        passed = {storage_of(leaf) for tree in (out, given) for leaf in tensor_leaves(tree).values()}
        made = [tensor for one in self.made or () if (tensor := one()) is not None]
        self._inside |= {storage_of(tensor) for tensor in made} - passed
        self._alive += made

    def _check(self, given: Mapping[str, object]) -> None:
        if any(storage_of(tensor) in self._inside for tensor in tensor_leaves(given).values()):
            # Blocks are not alone in what they do.
            self._operations.clear()

    def note(self, out: object) -> None:
        """Something that a function of torch gave within a block."""
        if self.made is not None:
            self.made += [weakref.ref(one) for one in tensor_leaves(out).values()]

    def _has_escaped(self, out: object, given: Mapping[str, object]) -> bool:
        """Whether somebody has a tensor that was made inside and not returned."""
        passed = {id(leaf) for tree in (out, given) for leaf in leaves(tree).values()}
        alive = [reference() for reference in self.made or ()]
        left = [tensor for tensor in alive if tensor is not None and id(tensor) not in passed]
        # Python 3.13 counts the tuple of arguments among those who have them.
        given_to_gc = tuple(left)
        own = {id(alive), id(left), id(self._kept), id(given_to_gc)}
        holders = gc.get_referrers(*given_to_gc) if left else []
        # Frames only pass tensors on: their variables end with the calls.
        return any(id(holder) not in own and not isinstance(holder, types.FrameType) for holder in holders)

    def _kinds_of(self, args: Args, kwargs: Kwargs) -> Hashable:
        numbers: dict[int, int] = {}

        def number(key: int) -> int:
            return numbers.setdefault(key, len(numbers))

        def kind(leaf: object) -> Hashable:
            if is_cache(leaf):
                return type(leaf), number(id(leaf))
            if not isinstance(leaf, Tensor):
                return described(leaf, self._is_known)
            if not is_placeholder(leaf):
                # Alive, so that no other tensor gets its id.
                self._alive.append(leaf)
                return id(leaf), torch_tensors.version(leaf), leaf.requires_grad
            same = (number(id(leaf)), number(storage_of(leaf)), leaf.storage_offset())
            return (*same, type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)

        return _modes(), _skeleton((args, kwargs), kind)

    def _kept_of(self, out: object, given: Mapping[str, object], own: set[int]) -> tuple[object] | None:
        """The output as it is to be given again; None if it cannot be."""
        places = {id(leaf): path for path, leaf in given.items() if not isinstance(leaf, _PLAIN)}
        taken = own | {storage_of(leaf) for leaf in tensor_leaves(given).values()}
        seen: dict[int, int] = {}
        failed = False

        def keep(_: str, leaf: object) -> object:
            nonlocal failed
            if id(leaf) in places:
                return Argument(places[id(leaf)])
            if isinstance(leaf, Tensor):
                storage = storage_of(leaf)
                # Views of what was given, and outputs that share memory, would come back as separate tensors.
                owner = seen.setdefault(storage, id(leaf))
                is_own = storage not in taken and owner == id(leaf) and self._is_made(leaf)
                failed |= not (is_own and is_placeholder(leaf) and (leaf.is_leaf or leaf.is_contiguous()))
            else:
                failed |= not isinstance(leaf, _PLAIN)
            return leaf

        kept = map_leaves(keep, out)
        return None if failed else (kept,)


class Operations:
    """What a block computes, operation by operation, with the shapes of what goes in: equal where blocks do the same.

    Tensors are known by the order in which they are first used.
    """

    def __init__(self) -> None:
        self.noted: list[Hashable] = []
        # Addresses must not be used again.
        self.alive: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def note(self, function: TorchFunction, given: Mapping[str, object]) -> None:
        self.noted.append((function, tuple((path, self._kind_of(leaf)) for path, leaf in given.items())))

    def _kind_of(self, leaf: object) -> Hashable:
        if not isinstance(leaf, Tensor):
            return type(leaf), leaf if isinstance(leaf, _CONSTANTS) else Unlike()
        self.alive.append(leaf)
        number = self._numbers.setdefault(storage_of(leaf), len(self._numbers))
        layout = leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device
        return number, type(leaf), is_placeholder(leaf), *layout


def is_cache(value: object) -> bool:
    """Whether it is one of transformers' caches of keys and values, of which each block uses its own."""
    return any(
        cls.__module__ == "transformers.cache_utils" and cls.__name__ == "Cache"
        for cls in type(value).__mro__
    )


def _skeleton(tree: object, kind: Callable[[object], Hashable]) -> Hashable:
    parts = children(tree)
    if parts is None:
        return kind(tree)
    return type(tree), tuple((step, _skeleton(part, kind)) for step, part in parts)


def _modes() -> Hashable:
    autocast = tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
    )
    return torch.is_grad_enabled(), torch.get_default_dtype(), autocast
