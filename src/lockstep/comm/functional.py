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
    """Concatenate nested tensors of all ranks along dim 0: [n_r, ...] become [sum of n_r, ...], 0-d become [ranks].

    Examples:
        ```python
        import torch
        from lockstep import PartialState
        from lockstep.utils import gather

        state = PartialState()
        ranks = gather(torch.tensor([state.process_index]))
        assert ranks.tolist() == list(range(state.num_processes))
        ```
    """
    return _communicator().gather(tensor)


def gather_object(object: object) -> list[Any]:
    """Return the lists of all ranks as one list, in rank order.

    Examples:
        ```python
        from lockstep import PartialState
        from lockstep.utils import gather_object

        state = PartialState()
        names = gather_object([f"rank {state.process_index}"])
        assert len(names) == state.num_processes and names[0] == "rank 0"
        ```
    """
    return _communicator().gather_object(object)


def broadcast(tensor: Tree, from_process: int = 0) -> Tree:
    """Overwrite nested tensors with those of rank ``from_process``. They have any shape, the same on all ranks.

    Examples:
        ```python
        import torch
        from lockstep import PartialState
        from lockstep.utils import broadcast

        state = PartialState()
        values = {"mean": torch.full((2,), float(state.process_index))}
        assert broadcast(values)["mean"].tolist() == [0, 0]  # those of rank 0
        ```
    """
    return _communicator().broadcast(tensor, from_process)


def broadcast_object_list(object_list: list[object], from_process: int = 0) -> list[Any]:
    """Overwrite the entries of a list of objects with those of rank ``from_process``.

    Examples:
        ```python
        from lockstep import PartialState
        from lockstep.utils import broadcast_object_list

        state = PartialState()
        names = [f"run of rank {state.process_index}"]
        assert broadcast_object_list(names) == ["run of rank 0"]
        ```
    """
    return _communicator().broadcast_object_list(object_list, from_process)


def reduce(tensor: Tree, reduction: Reduction = "mean", scale: float = 1.0) -> Tree:
    """Return the mean, sum or maximum of nested tensors over all ranks, multiplied by ``scale``.

    The tensors have any shape, the same on all ranks.

    Examples:
        ```python
        import torch
        from lockstep import PartialState
        from lockstep.utils import reduce

        state = PartialState()
        total = reduce(torch.ones(2), reduction="sum")
        assert total.tolist() == [state.num_processes] * 2
        ```
    """
    return _communicator().reduce(tensor, reduction, scale)


def pad_across_processes(tensor: Tree, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Tree:
    """Pad nested tensors of any shape along ``dim`` to the length of the longest one on any rank.

    Examples:
        ```python
        import torch
        from lockstep import PartialState
        from lockstep.utils import pad_across_processes

        state = PartialState()
        rows = torch.ones(state.process_index + 1, 2)  # more on later ranks
        assert pad_across_processes(rows).shape == (state.num_processes, 2)
        ```
    """
    return _communicator().pad_across_processes(tensor, dim, pad_index, pad_first)


def wait_for_everyone() -> None:
    """Return when every rank has called this.

    Examples:
        ```python
        from pathlib import Path
        from lockstep import PartialState
        from lockstep.utils import wait_for_everyone

        if PartialState().is_main_process:
            Path("written.txt").write_text("a")
        wait_for_everyone()
        assert Path("written.txt").exists()
        ```
    """
    PartialState().wait_for_everyone()


def is_torch_tensor(tensor: object) -> bool:
    """Whether this is a tensor.

    Examples:
        ```python
        import torch
        from lockstep.utils import is_torch_tensor

        assert is_torch_tensor(torch.zeros(2))
        assert not is_torch_tensor([0, 0])
        ```
    """
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

    Examples:
        ```python
        import torch
        from lockstep.utils import recursively_apply

        halved = recursively_apply(lambda tensor: tensor / 2, {"x": torch.tensor([4.0]), "name": "a"})
        assert halved["x"].item() == 2 and halved["name"] == "a"
        ```
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
    """``tensor[tensor_slice]`` of each tensor: [n, ...] to [rows of the slice, ...].

    Examples:
        ```python
        import torch
        from lockstep.utils import slice_tensors

        batch = {"x": torch.arange(8), "y": torch.arange(8)}
        assert slice_tensors(batch, slice(0, 2))["y"].tolist() == [0, 1]
        ```
    """
    sliced: Tree = map_tensors(lambda tensor: tensor[tensor_slice], data)
    return sliced
