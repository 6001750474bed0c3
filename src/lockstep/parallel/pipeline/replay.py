"""Blocks that are equal to one that was traced, and are called alike, give what that one gave."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.tree import children, leaves, map_leaves
from lockstep.model.equal_modules import describe, described, reading
from lockstep.parallel.pipeline.absent import is_stand_in
from lockstep.torch_internals import tensors as torch_tensors

_PLAIN = (bool, int, float, str, type(None))


class Given:
    """A leaf of what a block returns that is an argument of it."""

    def __init__(self, path: str) -> None:
        self.path = path


class Replays:
    """While one call of a model is traced.

    A block is replayed only if all of it is known to be equal: what it holds, what it is called with, and the modes
    that it is called in. What leaves more behind than its output (notes on itself, changed arguments, tensors that
    somebody else has taken) is not replayed, nor is what uses a tensor of the model outside of blocks.

    Args:
        storage: The key of a tensor's storage.
        is_known: Whether a storage belongs to a parameter outside of blocks, or to something that was computed.
        is_made: Whether a tensor was made by this segment.
        new: Makes a stand-in that this segment makes.
        kept: The tensors that the tracer itself keeps alive.
    """

    def __init__(
        self,
        storage: Callable[[Tensor], int],
        is_known: Callable[[Tensor], bool],
        is_made: Callable[[Tensor], bool],
        new: Callable[[Tensor], Tensor],
        kept: list[Tensor],
    ) -> None:
        self._storage, self._is_known, self._is_made = storage, is_known, is_made
        self._new, self._kept = new, kept
        self._traced: dict[Any, list[tuple[dict[Any, Any], Any]]] = {}
        self._alive: list[Any] = []
        self.made: list[weakref.ref[Tensor]] | None = None
        self.count = 0

    def call(self, module: Any, args: Any, kwargs: Any, run: Callable[[Any, Any, Any], Any]) -> Any:
        """What ``module`` returns; ``run(module, args, kwargs)`` traces it."""
        own: set[int] = set()  # storages of what the block holds, views of which are computed in it

        def is_known(tensor: Tensor) -> bool:
            if self._is_known(tensor):
                return True
            own.add(self._storage(tensor))
            return False

        before = describe(module, is_known)
        given = leaves((args, kwargs))
        kinds = self._kinds(args, kwargs)
        if kinds != self._kinds(
            args, kwargs
        ):  # something in it is like nothing else, such as a cache that is filled
            return run(module, args, kwargs)
        known = self._traced.setdefault((before.structure, kinds), [])
        for values, result in known:
            if all(before.values.get(key) == value for key, value in values.items()):
                self.count += 1
                return self._again(result, given)
        self.made = []
        with reading({type(inner) for inner in module.modules()}) as reads:
            out = run(module, args, kwargs)
        after = describe(module, lambda tensor: self._storage(tensor) not in own and self._is_known(tensor))
        is_whole = before == after and kinds == self._kinds(args, kwargs)
        result = self._kept_of(out, given, own) if is_whole and not self._has_escaped(out, given) else None
        if result is not None:
            known.append((before.read(reads), result))
        self.made = None
        return out

    def note(self, out: Any) -> None:
        """Something that a function of torch gave within a block."""
        if self.made is not None:
            self.made += [weakref.ref(one) for one in leaves(out).values() if isinstance(one, Tensor)]

    def _has_escaped(self, out: Any, given: dict[str, Any]) -> bool:
        """Whether somebody has a tensor that was made inside and not returned."""
        passed = {id(leaf) for tree in (out, given) for leaf in leaves(tree).values()}
        alive = [reference() for reference in self.made or ()]
        left = [tensor for tensor in alive if tensor is not None and id(tensor) not in passed]
        own = {id(alive), id(left), id(self._kept)}
        holders = gc.get_referrers(*left) if left else []
        return any(id(holder) not in own and not isinstance(holder, types.FrameType) for holder in holders)

    def _kinds(self, args: Any, kwargs: Any) -> Hashable:
        numbers: dict[int, int] = {}

        def number(key: int) -> int:
            return numbers.setdefault(key, len(numbers))

        def kind(leaf: Any) -> Hashable:
            if not isinstance(leaf, Tensor):
                return described(leaf, self._is_known)
            if not is_stand_in(leaf):
                self._alive.append(leaf)
                return id(leaf), torch_tensors.version(leaf), leaf.requires_grad
            same = (number(id(leaf)), number(self._storage(leaf)), leaf.storage_offset())
            return (*same, type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)

        return _modes(), _skeleton((args, kwargs), kind)

    def _kept_of(self, out: Any, given: dict[str, Any], own: set[int]) -> Any:
        """The output as it is to be given again; None if it cannot be."""
        places = {id(leaf): path for path, leaf in given.items() if not isinstance(leaf, _PLAIN)}
        taken = own | {self._storage(leaf) for leaf in given.values() if isinstance(leaf, Tensor)}
        seen: dict[int, int] = {}
        failed = False

        def keep(_: str, leaf: Any) -> Any:
            nonlocal failed
            if id(leaf) in places:
                return Given(places[id(leaf)])
            if isinstance(leaf, Tensor):
                storage = self._storage(leaf)
                owner = seen.setdefault(storage, id(leaf))
                is_own = storage not in taken and owner == id(leaf) and self._is_made(leaf)
                failed |= not (is_own and is_stand_in(leaf) and (leaf.is_leaf or leaf.is_contiguous()))
            else:
                failed |= not isinstance(leaf, _PLAIN)
            return leaf

        kept = map_leaves(keep, out)
        return None if failed else (kept,)

    def _again(self, result: Any, given: dict[str, Any]) -> Any:
        made: dict[int, Tensor] = {}

        def again(_: str, leaf: Any) -> Any:
            if isinstance(leaf, Given):
                return given[leaf.path]
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in made:
                new = self._new(leaf)
                made[id(leaf)] = (
                    new if leaf.is_leaf else new.clone()
                )  # what is no leaf may be changed in place
            return made[id(leaf)]

        return map_leaves(again, result[0])


def _skeleton(tree: Any, kind: Callable[[Any], Hashable]) -> Hashable:
    parts = children(tree)
    if parts is None:
        return kind(tree)
    return type(tree), tuple((step, _skeleton(part, kind)) for step, part in parts)


def _modes() -> Hashable:
    autocast = tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
    )
    return torch.is_grad_enabled(), torch.get_default_dtype(), autocast
