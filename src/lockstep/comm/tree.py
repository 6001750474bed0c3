"""Mapping over nested containers of tensors.

A container is a list, tuple, named tuple, any mapping (dict, ``UserDict`` such as transformers'
``BatchEncoding``, ``ModelOutput``) or a dataclass instance. Everything else is a leaf. Containers
come back with their types; those that were given are not changed. A leaf's path reads like the
code that reaches it: ``['labels'][0].mask``.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence, Set
from dataclasses import fields, is_dataclass
from functools import partial
from operator import methodcaller
from typing import Any, TypeAlias, TypeVar

import torch

Tree = TypeVar("Tree")
"""Tensors in nested containers, or one alone: they come back in the same ones."""

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
"""The arguments of a call of a user's code, which may be anything."""

LossFunction: TypeAlias = Callable[..., torch.Tensor]
"""Called with a model's output and the targets; returns the loss, 0-d."""

StateDict: TypeAlias = dict[str, Any]
"""What a ``state_dict`` returns: tensors, numbers, and containers of them."""

_PLAIN = {torch.Tensor}

# torch.Size is a tuple that takes nothing but numbers.
_LEAVES = (torch.Tensor, str, int, float, type(None), torch.Size)


def children(tree: object) -> list[tuple[str, object]] | None:
    """Return the parts of a container, each with its step of the path; None for a leaf."""
    if isinstance(tree, _LEAVES):
        return None
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{name}", value) for name, value in zip(tree._fields, tree, strict=True)]
    if isinstance(tree, (list, tuple)):
        return [(f"[{index}]", value) for index, value in enumerate(tree)]
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", tree[key]) for key in tree]
    if is_dataclass(tree) and not isinstance(tree, type):
        return [(f".{field.name}", getattr(tree, field.name)) for field in fields(tree)]
    return None


def rebuild(tree: Any, parts: Iterable[Any]) -> Any:
    """Return a container like ``tree`` with other parts, in the order of ``children``."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*parts)
    if isinstance(tree, (list, tuple)):
        return type(tree)(parts)
    if isinstance(tree, MutableMapping):
        # A copy, which keeps what the type holds besides its items.
        new = copy.copy(tree)
        for key, part in zip(list(tree), parts, strict=True):
            new[key] = part
        return new
    if isinstance(tree, Mapping):
        return type(tree)(dict(zip(tree, parts, strict=True)))  # type: ignore[call-arg]
    new = copy.copy(tree)
    for field, part in zip(fields(tree), parts, strict=True):
        # Frozen dataclasses, too; ``__post_init__`` has run once.
        object.__setattr__(new, field.name, part)
    return new


def map_leaves(fn: Callable[[str, Any], object], tree: object, path: str = "") -> Any:
    """Return ``tree`` with every leaf replaced by ``fn(path, leaf)``."""
    parts = children(tree)
    if parts is None:
        return fn(path, tree)
    return rebuild(tree, [map_leaves(fn, part, path + step) for step, part in parts])


def map_tensors(fn: Callable[[torch.Tensor], object], tree: object) -> Any:
    """Return ``tree`` with every tensor replaced by ``fn(tensor)``; other leaves pass through."""
    return map_leaves(lambda _, leaf: fn(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def leaves(tree: object) -> dict[str, Any]:
    """Path and leaf of every leaf, depth first."""
    found: dict[str, object] = {}
    map_leaves(found.__setitem__, tree)
    return found


def tensor_leaves(tree: object) -> dict[str, torch.Tensor]:
    """Path and tensor of every leaf that is one, depth first."""
    return {path: leaf for path, leaf in leaves(tree).items() if isinstance(leaf, torch.Tensor)}


def find_batch_size(data: object) -> int:
    """Return the batch size: n of the first tensor of shape [n, ...] in nested ``data``.

    Raises:
        ValueError: ``data`` has no tensor with a dimension.

    Examples:
        ```python
        import torch
        from lockstep.utils import find_batch_size

        assert find_batch_size({"ids": torch.zeros(8, 128), "labels": torch.zeros(8)}) == 8
        ```
    """
    for leaf in leaves(data).values():
        if isinstance(leaf, torch.Tensor) and leaf.ndim > 0:
            return leaf.shape[0]
    raise ValueError(
        f"A batch of type {type(data).__name__} holds no tensor with a dimension, so its size is unknown. "
        "Have the dataset or the collate function return tensors."
    )


def concatenate(data: Sequence[Tree], dim: int = 0) -> Tree:
    """Concatenate the tensors of several batches.

    Args:
        data: A sequence of batches with the same nesting. Tensors of shape [n_i, ...] become [sum of n_i, ...], and
            may differ in ``dim`` only. 0-d tensors become a vector. Other leaves, such as texts, must be equal in all
            batches.
        dim: The dimension along which tensors are concatenated.

    Raises:
        TypeError: leaves that are not tensors differ.
        ValueError: ``data`` is empty, or the nestings differ.

    Examples:
        ```python
        import torch
        from lockstep.utils import concatenate

        whole = concatenate([{"x": torch.zeros(2, 3)}, {"x": torch.ones(1, 3)}])
        assert whole["x"].shape == (3, 3)
        ```
    """
    if not data:
        raise ValueError("The list of batches to concatenate is empty. Pass at least one batch.")
    parts = [leaves(tree) for tree in data]
    if any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError(
            f"Nested tensors can be concatenated only if all have one structure, but their leaves are "
            f"{' and '.join(str(sorted(part)) for part in parts)}. Give all the same structure."
        )

    def join(path: str, first: object) -> object:
        values = [part[path] for part in parts]
        if all(isinstance(value, torch.Tensor) for value in values):
            return torch.cat([value.reshape(1) if value.ndim == 0 else value for value in values], dim=dim)
        if any(isinstance(value, torch.Tensor) or value != first for value in values):
            raise TypeError(
                f"{path or 'The tree'} holds different values of type {type(first).__name__}, but only tensors "
                "can be concatenated. Convert them to tensors or leave them out."
            )
        return first

    return map_leaves(join, data[0])


def send_to_device(
    tensor: Tree,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Iterable[str] | None = None,
) -> Tree:
    """Return nested data with its tensors on a device.

    Args:
        tensor: Tensors of any shape, or other objects with a method ``to``, alone or nested.
        device: Where they go. A number is the index of an accelerator.
        non_blocking: Copy asynchronously, from pinned memory.
        skip_keys: Keys of mappings, at any depth, whose values stay where they are.

    Examples:
        ```python
        import torch
        from lockstep.utils import send_to_device

        batch = send_to_device({"x": torch.zeros(2), "name": "a"}, "cpu")  # or 0, the first GPU
        assert batch["x"].device == torch.device("cpu")
        ```
    """
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())
    return mover(device, non_blocking)(tensor, skipped)


def mover(
    device: torch.device | str | int,
    non_blocking: bool,
    move_tensor: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Callable[..., Any]:
    """Return a function of data and skipped keys that acts as ``send_to_device``; ``move_tensor``, if given, moves the
    tensors."""
    move = methodcaller("to", device, non_blocking=non_blocking)
    return partial(_moved, move_tensor or move, partial(_move_object, move, device))


def _moved(
    move_tensor: Callable[[torch.Tensor], torch.Tensor],
    move_object: Callable[[object], object],
    tree: object,
    skipped: Set[object] = frozenset(),
) -> Any:
    # What default_collate mostly makes needs no walk over a tree.
    if type(tree) is list and _PLAIN.issuperset(map(type, tree)):
        return list(map(move_tensor, tree))
    if isinstance(tree, torch.Tensor):
        return move_tensor(tree)
    # BatchEncoding.to changes the object in place and knows no skip_keys: it is taken as a mapping.
    if hasattr(tree, "to") and not isinstance(tree, (UserDict, type)):
        return move_object(tree)
    parts = children(tree)
    if parts is None:
        return tree
    keys: list[object] = list(tree) if isinstance(tree, Mapping) else [None] * len(parts)
    return rebuild(
        tree,
        [
            part if key in skipped else _moved(move_tensor, move_object, part, skipped)
            for key, (_, part) in zip(keys, parts, strict=True)
        ],
    )


def _move_object(move: Callable[[object], object], device: torch.device | str | int, one: Any) -> object:
    try:
        return move(one)
    except TypeError:
        return one.to(device)


def to_float32(tensor: Tree) -> Tree:
    """Return nested data with its float16 and bfloat16 tensors in float32.

    Args:
        tensor: Tensors of any shape, alone or nested. Other dtypes, and leaves that are not tensors, stay as they
            are.

    Examples:
        ```python
        import torch
        from lockstep.utils import convert_to_fp32

        outputs = convert_to_fp32({"logits": torch.ones(2, dtype=torch.bfloat16), "ids": torch.tensor([1])})
        assert outputs["logits"].dtype == torch.float32
        assert outputs["ids"].dtype == torch.int64
        ```
    """
    half = (torch.float16, torch.bfloat16)
    return map_tensors(lambda one: one.float() if one.dtype in half else one, tensor)


def listify(data: object) -> Any:
    """Return nested ``data`` with lists of numbers in place of its tensors, of any shape. A 0-d tensor becomes a
    number.

    Examples:
        ```python
        import torch
        from lockstep.utils import listify

        assert listify({"loss": torch.tensor(0.5), "ids": torch.tensor([1, 2])}) == {"loss": 0.5, "ids": [1, 2]}
        ```
    """
    return map_tensors(lambda tensor: tensor.tolist(), data)
