"""The collectives as functions, for code that has no ``Accelerator`` at hand. Same arguments, same checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lockstep.comm.collectives import Communicator, Reduction
from lockstep.comm.tree import Tree, map_leaves, map_tensors
from lockstep.runtime import process
from lockstep.runtime.control import PartialState


def _communicator() -> Communicator:
    return Communicator(process.start())


def gather(tensor: Tree) -> Tree:
    """Nested tensors of all ranks, concatenated on dim 0: [n_r, ...] to [sum of n_r, ...], 0-d ones to [ranks]."""
    return _communicator().gather(tensor)


def gather_object(object: object) -> list[Any]:
    """The lists of all ranks as one list, in rank order."""
    return _communicator().gather_object(object)


def broadcast(tensor: Tree, from_process: int = 0) -> Tree:
    """Rank ``from_process``'s nested tensors, in place: any shape, the same on all ranks."""
    return _communicator().broadcast(tensor, from_process)


def broadcast_object_list(object_list: list[object], from_process: int = 0) -> list[Any]:
    """Rank ``from_process``'s objects, in place."""
    return _communicator().broadcast_object_list(object_list, from_process)


def reduce(tensor: Tree, reduction: Reduction = "mean", scale: float = 1.0) -> Tree:
    """Mean, sum or maximum over ranks of nested tensors, times ``scale``: any shape, the same on all ranks."""
    return _communicator().reduce(tensor, reduction, scale)


def pad_across_processes(tensor: Tree, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Tree:
    """Nested tensors of any shape padded along ``dim`` to the longest of any rank."""
    return _communicator().pad_across_processes(tensor, dim, pad_index, pad_first)


def wait_for_everyone() -> None:
    """Return when every rank has called this."""
    PartialState().wait_for_everyone()


def is_torch_tensor(tensor: object) -> bool:
    """Whether this is a tensor."""
    return isinstance(tensor, torch.Tensor)


def recursively_apply(
    func: Callable[..., object],
    data: object,
    *args: object,
    test_type: Callable[[object], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: object,
) -> Any:
    """``func(leaf, *args, **kwargs)`` on each leaf of ``data`` that ``test_type`` accepts.

    Raises:
        TypeError: with ``error_on_other_type``, for any other leaf.
    """

    def apply(path: str, leaf: object) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(
                f"{path or 'data'} is a {type(leaf).__name__}, which {getattr(func, '__name__', func)} does not take. "
                "Pass nested lists, tuples and dicts of tensors."
            )
        return leaf

    return map_leaves(apply, data)


def slice_tensors(
    data: Tree, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Tree:
    """``tensor[tensor_slice]`` of each tensor: [n, ...] to [rows of the slice, ...]."""
    sliced: Tree = map_tensors(lambda tensor: tensor[tensor_slice], data)
    return sliced
