"""Names that scripts import from ``accelerate.utils.operations``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.comm.collectives import CannotPadNestedTensorWarning
from lockstep.comm.dtensor import full, is_dtensor, local, shard_like, shown_whole
from lockstep.comm.tree import children, leaves, rebuild
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
from lockstep.utils.constants import TORCH_DISTRIBUTED_OPERATION_TYPES
from lockstep.utils.dataclasses import TensorInformation

__all__ = [
    "TENSOR_INT_TO_DTYPE",
    "TENSOR_TYPE_TO_INT",
    "TORCH_DISTRIBUTED_OPERATION_TYPES",
    "CannotPadNestedTensorWarning",
    "ConvertOutputsToFp32",
    "DistributedOperationException",
    "GatheredParameters",
    "broadcast",
    "broadcast_object_list",
    "chained_operation",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "gather_tensor_shape",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "is_torch_xpu_tensor",
    "listify",
    "pad_across_processes",
    "pad_input_tensors",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
    "verify_operation",
]

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
TENSOR_INT_TO_DTYPE = dict(enumerate(_DTYPES, 1))
TENSOR_TYPE_TO_INT = {dtype: number for number, dtype in TENSOR_INT_TO_DTYPE.items()}


def is_tensor_information(tensor_info: Any) -> bool:
    return isinstance(tensor_info, TensorInformation)


def is_torch_xpu_tensor(tensor: Any) -> bool:
    return is_torch_tensor(tensor) and tensor.device.type == "xpu"


def is_namedtuple(data: Any) -> bool:
    """Whether it is an object of a class that ``collections.namedtuple`` or ``typing.NamedTuple`` made."""
    return isinstance(data, tuple) and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterator[Any]) -> Any:
    """What the generator gives as a list or (named) tuple of the type of ``obj``."""
    return rebuild(obj, generator) if is_namedtuple(obj) else type(obj)(generator)


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor in nested data; None: there is none."""
    return next((leaf.device for leaf in leaves(data).values() if is_torch_tensor(leaf)), None)


def ignorant_find_batch_size(data: Any) -> int | None:
    """``find_batch_size``, or None where there is none."""
    try:
        return find_batch_size(data)
    except ValueError:
        return None


def get_data_structure(data: Any) -> Any:
    """Nested data with a ``TensorInformation`` in place of each tensor."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """Nested data with the shape, as a list, in place of each tensor."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Nested data with an empty tensor in place of each ``TensorInformation``."""
    if is_tensor_information(data_structure):
        return torch.empty(data_structure.shape, dtype=data_structure.dtype)
    parts = children(data_structure)
    if parts is None:
        return data_structure
    return rebuild(data_structure, [initialize_tensors(part) for _, part in parts])


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Nested tensors with zeros behind, so that ``num_processes`` can have equally many rows: [n, ...] to [m, ...]."""

    def padded(one: torch.Tensor) -> torch.Tensor:
        shape = list(one.shape)
        shape[dim] = -(-batch_size // num_processes) * num_processes
        result = one.new_zeros(shape)
        result.narrow(dim, 0, one.shape[dim]).copy_(one)
        return result

    return recursively_apply(padded, tensor, error_on_other_type=True)


def gather_tensor_shape(tensor: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """Shape and type of the tensor that one rank has; the others pass None. Collective.

    The shape is int32 of shape [dimensions, 1], the type a key of ``TENSOR_INT_TO_DTYPE``.
    """
    known = _of_one_rank(tensor, "gather_tensor_shape")
    shape = torch.tensor(known.shape, dtype=torch.int32, device=process.start().device)
    return shape[:, None], TENSOR_TYPE_TO_INT[known.dtype]


def _of_one_rank(tensor: torch.Tensor | None, name: str) -> TensorInformation:
    found = [one for one in gather_object([None if tensor is None else get_data_structure(tensor)]) if one]
    if len(found) != 1:
        raise UsageError(f"{name} needs one rank with a tensor, but {len(found)} have one.")
    known: TensorInformation = found[0]
    return known


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor that one rank has, of any shape, on all ranks; the others pass None. Collective."""
    found = _of_one_rank(tensor, "copy_tensor_to_devices")
    known = tensor if tensor is not None else torch.zeros(found.shape, dtype=found.dtype)
    copied: torch.Tensor = reduce(known.to(process.start().device), reduction="sum")
    return copied


class ConvertOutputsToFp32:
    """A function whose float16 and bfloat16 results become float32."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> Any:
        raise UsageError(
            "A prepared model that computes in mixed precision cannot be pickled. Unwrap it first: "
            "accelerator.unwrap_model(model, keep_fp32_wrapper=False)."
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """``ConvertOutputsToFp32`` as a plain function."""
    converted = ConvertOutputsToFp32(model_forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return converted(*args, **kwargs)

    forward.__wrapped__ = converted  # type: ignore[attr-defined]
    return forward


def verify_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for which all ranks must pass tensors of one shape. Ours compare without it.

    Raises:
        DistributedOperationException: on every rank, with the shapes.
    """

    @functools.wraps(function)
    def verified(*args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else kwargs["tensor"]
        shapes = gather_object([get_shape(tensor)]) if process.start().world_size > 1 else []
        if any(shape != shapes[0] for shape in shapes):
            rows = ", ".join(f"rank {rank}: {shape}" for rank, shape in enumerate(shapes))
            raise DistributedOperationException(
                f"{function.__name__} got tensors of different shapes ({rows}). Pass tensors of one shape, or pad them."
            )
        return function(*args, **kwargs)

    return verified


def chained_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose ``DistributedOperationException`` says that it was raised in it."""

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            raise DistributedOperationException(f"In {function.__name__}: {error}") from error

    return named


@contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
) -> Iterator[None]:
    """Inside, these parameters are whole: they themselves, not copies of them. Collective.

    Args:
        params: Parameters of prepared models, one or many; those that are not sharded are whole always.
        modifier_rank: The rank whose changes hold on all ranks afterwards; None: nobody changes them.
        fwd_module: Ignored.
        enabled: Otherwise it does nothing.

    Models must not be called inside. What ranks other than ``modifier_rank`` change is lost, as in an exception all is.

    Raises:
        UsageError: with ``modifier_rank=None`` this rank has changed one of them.

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
                f"Rank {process.start().rank} changed {sum(changed)} of the {len(sharded)} parameters inside of "
                "GatheredParameters, which is lost. Pass modifier_rank, the rank whose changes hold."
            )
        return
    with torch.no_grad():
        for parameter, whole in zip(sharded, wholes, strict=True):
            given_whole = broadcast(whole.detach().reshape(parameter.shape), from_process=modifier_rank)
            local(parameter).copy_(local(shard_like(given_whole, parameter)))
