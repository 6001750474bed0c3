"""The collectives as functions, for code that has no ``Accelerator`` at hand. Same arguments, same checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lockstep.comm.collectives import Communicator, Reduction
from lockstep.comm.tree import Tree, map_leaves, map_tensors
from lockstep.runtime import process
from lockstep.runtime.run_state import PartialState


def _communicator() -> Communicator:
    return Communicator(process.start_runtime())


def gather(tensor: Tree) -> Tree:
    """Concatenate the tensors of all ranks along dim 0, in rank order, and return the result on every rank.

    Args:
        tensor: Tensors, alone or nested in lists, tuples and mappings. Tensors of shape [n_r, ...] on rank r become
            one of shape [sum of n_r, ...]. The n_r may differ. 0-d tensors become one of shape [ranks].

    Raises:
        CollectiveMismatchError: dtypes or shapes differ between ranks, apart from n_r. All ranks raise it.
        TypeError: ``tensor`` has something that is not a tensor. All ranks raise it.

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
    """Return the lists of all ranks as one list, in rank order, on every rank.

    Args:
        object: A list or tuple of objects that can be pickled. Anything else counts as a list with one object.

    Raises:
        TypeError: an object cannot be pickled. All ranks raise it.

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
    """Overwrite tensors, in place, with those of one rank, and return them.

    Args:
        tensor: Tensors of any shape, alone or nested. Shapes and dtypes are the same on all ranks.
        from_process: The rank whose values all ranks get.

    Raises:
        CollectiveMismatchError: shapes or dtypes differ between ranks. All ranks raise it.
        TypeError: ``tensor`` has something that is not a tensor. All ranks raise it.
        UsageError: there is no rank ``from_process``.

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
    """Overwrite the entries of a list, in place, with those of one rank, and return the list.

    Args:
        object_list: A list of objects that can be pickled, of the same length on all ranks.
        from_process: The rank whose entries all ranks get.

    Raises:
        CollectiveMismatchError: the lengths differ between ranks. All ranks raise it.
        TypeError: an object cannot be pickled. All ranks raise it.
        UsageError: there is no rank ``from_process``.

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
    """Return the mean, sum or maximum of tensors over all ranks, on every rank.

    float16 and bfloat16 are added up in float32. The mean of integers is a floating-point number.

    Args:
        tensor: Tensors of any shape, alone or nested. Shapes and dtypes are the same on all ranks.
        reduction: ``"mean"``, ``"sum"`` or ``"max"``. ``"none"`` returns ``tensor`` as it is.
        scale: A factor by which the result is multiplied.

    Raises:
        CollectiveMismatchError: shapes or dtypes differ between ranks. All ranks raise it.
        TypeError: ``tensor`` has something that is not a tensor. All ranks raise it.
        ValueError: another ``reduction``.

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
    """Pad tensors along one dimension to the length of the longest tensor on any rank.

    Args:
        tensor: Tensors of any shape, alone or nested. A tensor without the dimension ``dim`` stays as it is.
        dim: The dimension that is padded.
        pad_index: The value of the padding.
        pad_first: Pad at the beginning, and not at the end.

    Raises:
        CollectiveMismatchError: dtypes or nesting differ between ranks. All ranks raise it.
        TypeError: ``tensor`` has something that is not a tensor. All ranks raise it.

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
    """Wait until every rank has called this function.

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
    """Return whether ``tensor`` is a ``torch.Tensor``, of any shape.

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
    """Call a function on each leaf of nested data, and return the results in the same nesting.

    Args:
        func: Called as ``func(leaf, *args, **kwargs)``.
        data: Nested lists, tuples, mappings and dataclasses. Tensors have any shape.
        args: Further positional arguments of ``func``.
        test_type: Decides which leaves ``func`` gets: by default tensors. The others stay as they are.
        error_on_other_type: Raise an error for the other leaves.
        kwargs: Further keyword arguments of ``func``.

    Raises:
        TypeError: ``error_on_other_type`` is True, and ``test_type`` does not accept a leaf.

    Examples:
        ```python
        import torch
        from lockstep.utils import recursively_apply

        halved = recursively_apply(lambda tensor: tensor / 2, {"x": torch.tensor([4.0]), "name": "a"})
        assert halved["x"].item() == 2 and halved["name"] == "a"
        ```
    """

    def apply(path: str, leaf: object) -> object:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(
                f"{path or 'data'} is a {type(leaf).__name__}, which {getattr(func, '__name__', func)} does not "
                "take. Pass nested lists, tuples or dicts of tensors."
            )
        return leaf

    return map_leaves(apply, data)


def slice_tensors(
    data: Tree, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Tree:
    """Return the same rows of each tensor: ``tensor[tensor_slice]``.

    Args:
        data: Tensors of shape [n, ...], alone or nested. They become [rows of the slice, ...], and share memory.
        tensor_slice: The rows, such as ``slice(0, 2)``.
        process_index: Ignored, as in Accelerate.
        num_processes: Ignored, as in Accelerate.

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
