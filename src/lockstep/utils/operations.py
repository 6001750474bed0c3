"""Names that scripts import from ``accelerate.utils.operations``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from lockstep.comm.collectives import CannotPadNestedTensorWarning
from lockstep.comm.dtensor import full, is_dtensor, local, shard_like, shown_whole
from lockstep.comm.tree import Tree, leaves
from lockstep.comm.tree import to_float32 as convert_to_fp32
from lockstep.errors import CollectiveMismatchError as DistributedOperationException
from lockstep.errors import UsageError
from lockstep.runtime import process
from lockstep.torch_internals.tensors import bits_digest
from lockstep.utils import (
    broadcast,
    broadcast_object_list,
    concatenate,
    find_batch_size,
    gather,
    gather_object,
    is_torch_tensor,
    listify,
    pad_across_processes,
    recursively_apply,
    reduce,
    send_to_device,
    slice_tensors,
)

__all__ = [
    "CannotPadNestedTensorWarning",
    "ConvertOutputsToFp32",
    "DistributedOperationException",
    "GatheredParameters",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
]


def find_device(data: object) -> torch.device | None:
    """Return the device of the first tensor in nested ``data``. None: there is no tensor.

    Examples:
        ```python
        import torch
        from lockstep.utils import find_device

        assert find_device({"name": "a", "x": torch.zeros(2)}) == torch.device("cpu")
        assert find_device(["a"]) is None
        ```
    """
    return next((leaf.device for leaf in leaves(data).values() if is_torch_tensor(leaf)), None)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Return, on all ranks, the tensor that one rank has. Call it on every rank.

    Args:
        tensor: A tensor of any shape on one rank, and None on the others.

    Raises:
        UsageError: not exactly one rank has a tensor.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator
        from lockstep.utils.operations import copy_tensor_to_devices

        accelerator = Accelerator()
        copied = copy_tensor_to_devices(torch.ones(2) if accelerator.is_main_process else None)
        assert copied.tolist() == [1, 1]  # on every rank
        ```
    """
    found: list[torch.Tensor] = [one for one in gather_object([tensor]) if one is not None]
    if len(found) != 1:
        raise UsageError(
            f"copy_tensor_to_devices takes a tensor on one rank and None on the others, but {len(found)} ranks have "
            "one. Pass it on one rank."
        )
    return found[0].to(process.start_runtime().device)


class ConvertOutputsToFp32:
    """A function whose float16 and bfloat16 results become float32. It cannot be pickled.

    Args:
        model_forward: The function, such as the forward of a model under autocast.

    Examples:
        ```python
        import torch
        from lockstep.utils import ConvertOutputsToFp32

        double = ConvertOutputsToFp32(lambda x: 2 * x)
        assert double(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float32
        ```
    """

    def __init__(self, model_forward: Callable[..., object]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> NoReturn:
        raise UsageError(
            "A prepared model that computes in mixed precision cannot be pickled. Unwrap it first: "
            "accelerator.unwrap_model(model, keep_fp32_wrapper=False)."
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Tree]) -> Callable[..., Tree]:
    """Return a plain function like ``model_forward``, whose float16 and bfloat16 results become float32.

    Examples:
        ```python
        import torch
        from lockstep.utils import convert_outputs_to_fp32

        double = convert_outputs_to_fp32(lambda x: 2 * x)
        assert double(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float32
        ```
    """
    converted = ConvertOutputsToFp32(model_forward)

    def forward(*args: object, **kwargs: object) -> Tree:
        return converted(*args, **kwargs)

    forward.__wrapped__ = converted  # type: ignore[attr-defined]
    return forward


@contextmanager
def GatheredParameters(
    params: torch.Tensor | Iterable[torch.Tensor],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Make sharded parameters whole on every rank inside of the block. Enter it on every rank.

    The parameters themselves are whole, not copies. Models must not be called inside.

    Args:
        params: Parameters of prepared models, of any shape: one or many. Those that are not sharded are always whole.
        modifier_rank: The rank whose changes all ranks get afterwards. Changes by other ranks are lost, and so are
            all changes if an exception is raised inside. None: no rank changes them.
        fwd_module: Ignored.
        enabled: False: nothing happens.

    Raises:
        UsageError: ``modifier_rank`` is None, and this rank has changed a parameter.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator
        from lockstep.utils import GatheredParameters

        accelerator = Accelerator(parallel="zero=3")
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with GatheredParameters(list(model.parameters())):
            assert sum(parameter.numel() for parameter in model.parameters()) == 5  # whole, on every rank
        ```
    """
    given = [params] if isinstance(params, torch.Tensor) else list(params)
    sharded = [parameter for parameter in dict.fromkeys(given) if enabled and is_dtensor(parameter)]
    wholes = [full(parameter).clone().requires_grad_(parameter.requires_grad) for parameter in sharded]
    before = [bits_digest(whole) for whole in wholes] if modifier_rank is None else []
    with shown_whole(sharded, wholes):
        yield
    if modifier_rank is None:
        changed = [bits_digest(whole) != digest for whole, digest in zip(wholes, before, strict=True)]
        if any(changed):
            raise UsageError(
                f"Rank {process.start_runtime().rank} changed {sum(changed)} of the {len(sharded)} parameters inside "
                "GatheredParameters, but these changes are lost. Pass modifier_rank: the rank whose changes are "
                "kept."
            )
        return
    with torch.no_grad():
        for parameter, whole in zip(sharded, wholes, strict=True):
            given_whole = broadcast(whole.detach().reshape(parameter.shape), from_process=modifier_rank)
            local(parameter).copy_(local(shard_like(given_whole, parameter)))
