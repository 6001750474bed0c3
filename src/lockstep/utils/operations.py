"""Names that scripts import from ``accelerate.utils.operations``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import nn

from lockstep.comm.collectives import CannotPadNestedTensorWarning
from lockstep.comm.dtensor import full, is_dtensor, local, shard_like, shown_whole
from lockstep.comm.tree import Tree, children, leaves, rebuild
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

OperationArgs = ParamSpec("OperationArgs")
Reduced = TypeVar("Reduced")


def is_tensor_information(tensor_info: object) -> bool:
    """Return whether ``tensor_info`` is a ``TensorInformation``.

    Examples:
        ```python
        import torch
        from lockstep.utils import get_data_structure, is_tensor_information

        assert is_tensor_information(get_data_structure(torch.zeros(2)))
        ```
    """
    return isinstance(tensor_info, TensorInformation)


def is_torch_xpu_tensor(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a tensor of any shape on a GPU of Intel.

    Examples:
        ```python
        import torch
        from lockstep.utils import is_torch_xpu_tensor

        assert not is_torch_xpu_tensor(torch.zeros(2, device="cpu"))
        ```
    """
    return is_torch_tensor(tensor) and tensor.device.type == "xpu"


def is_namedtuple(data: object) -> bool:
    """Return whether ``data`` is a named tuple.

    Examples:
        ```python
        from collections import namedtuple
        from lockstep.utils import is_namedtuple

        assert is_namedtuple(namedtuple("Batch", "x y")(1, 2))
        assert not is_namedtuple((1, 2))
        ```
    """
    return isinstance(data, tuple) and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterator[object]) -> Any:
    """Return the items of ``generator`` as a list, tuple or named tuple of the type of ``obj``.

    Examples:
        ```python
        from collections import namedtuple
        from lockstep.utils import honor_type

        Batch = namedtuple("Batch", "x y")
        assert honor_type(Batch(1, 2), (2 * value for value in (1, 2))) == Batch(2, 4)
        ```
    """
    return rebuild(obj, generator) if is_namedtuple(obj) else type(obj)(generator)


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


def ignorant_find_batch_size(data: object) -> int | None:
    """Return the batch size: n of the first tensor of shape [n, ...] in nested ``data``. None: there is no such
    tensor.

    Examples:
        ```python
        import torch
        from lockstep.utils import ignorant_find_batch_size

        assert ignorant_find_batch_size({"x": torch.zeros(8, 4)}) == 8
        assert ignorant_find_batch_size("a") is None
        ```
    """
    try:
        return find_batch_size(data)
    except ValueError:
        return None


def get_data_structure(data: object) -> Any:
    """Return nested ``data`` with a ``TensorInformation`` in place of each tensor.

    Examples:
        ```python
        import torch
        from lockstep.utils import get_data_structure

        assert get_data_structure({"x": torch.zeros(8, 4)})["x"].shape == (8, 4)
        ```
    """
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: object) -> Any:
    """Return nested ``data`` with the shape, as a list, in place of each tensor.

    Examples:
        ```python
        import torch
        from lockstep.utils import get_shape

        assert get_shape({"x": torch.zeros(8, 4)}) == {"x": [8, 4]}
        ```
    """
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Return nested data with an uninitialised tensor in place of each ``TensorInformation`` in ``data_structure``.

    Examples:
        ```python
        import torch
        from lockstep.utils import get_data_structure, initialize_tensors

        empty = initialize_tensors(get_data_structure({"x": torch.zeros(8, 4)}))
        assert empty["x"].shape == (8, 4)
        ```
    """
    if is_tensor_information(data_structure):
        return torch.empty(data_structure.shape, dtype=data_structure.dtype)
    parts = children(data_structure)
    if parts is None:
        return data_structure
    return rebuild(data_structure, [initialize_tensors(part) for _, part in parts])


def pad_input_tensors(tensor: Tree, batch_size: int, num_processes: int, dim: int = 0) -> Tree:
    """Pad tensors with zeros at their end, so that ``num_processes`` can have equally many rows.

    Args:
        tensor: Tensors of shape [n, ...], alone or nested. They become [m, ...].
        batch_size: n. m is the next multiple of ``num_processes``.
        num_processes: The number of parts.
        dim: The dimension that is padded.

    Raises:
        TypeError: ``tensor`` has something that is not a tensor.

    Examples:
        ```python
        import torch
        from lockstep.utils import pad_input_tensors

        batch = pad_input_tensors({"x": torch.ones(3, 2)}, batch_size=3, num_processes=2)
        assert batch["x"].shape == (4, 2) and batch["x"][3].sum() == 0
        ```
    """

    def padded(one: torch.Tensor) -> torch.Tensor:
        shape = list(one.shape)
        shape[dim] = -(-batch_size // num_processes) * num_processes
        result = one.new_zeros(shape)
        result.narrow(dim, 0, one.shape[dim]).copy_(one)
        return result

    return recursively_apply(padded, tensor, error_on_other_type=True)


def gather_tensor_shape(tensor: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """Tell all ranks the shape and the dtype of a tensor that one rank has. Call it on every rank.

    Args:
        tensor: A tensor of any shape on one rank, and None on the others.

    Returns:
        The shape, as an int32 tensor of shape [dimensions, 1], and the key of the dtype in ``TENSOR_INT_TO_DTYPE``.

    Raises:
        UsageError: not exactly one rank has a tensor.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator
        from lockstep.utils import TENSOR_INT_TO_DTYPE, gather_tensor_shape

        accelerator = Accelerator()
        shape, kind = gather_tensor_shape(torch.zeros(8, 4) if accelerator.is_main_process else None)
        assert shape.flatten().tolist() == [8, 4] and TENSOR_INT_TO_DTYPE[kind] == torch.float32
        ```
    """
    known = _of_one_rank(tensor, "gather_tensor_shape")
    shape = torch.tensor(known.shape, dtype=torch.int32, device=process.start_runtime().device)
    return shape[:, None], TENSOR_TYPE_TO_INT[known.dtype]


def _of_one_rank(tensor: torch.Tensor | None, name: str) -> TensorInformation:
    found = [one for one in gather_object([None if tensor is None else get_data_structure(tensor)]) if one]
    if len(found) != 1:
        raise UsageError(
            f"{name} needs exactly one rank with a tensor, but {len(found)} have one. Pass a tensor on one rank, and "
            "None on the others."
        )
    known: TensorInformation = found[0]
    return known


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
        from lockstep.utils import copy_tensor_to_devices

        accelerator = Accelerator()
        copied = copy_tensor_to_devices(torch.ones(2) if accelerator.is_main_process else None)
        assert copied.tolist() == [1, 1]  # on every rank
        ```
    """
    found = _of_one_rank(tensor, "copy_tensor_to_devices")
    known = tensor if tensor is not None else torch.zeros(found.shape, dtype=found.dtype)
    copied: torch.Tensor = reduce(known.to(process.start_runtime().device), reduction="sum")
    return copied


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


def verify_operation(
    function: Callable[OperationArgs, Reduced],
) -> Callable[OperationArgs, Reduced]:
    """Decorate a collective function so that it first compares the shapes of its tensors between the ranks.

    ``gather`` and the other functions here compare without it.

    Args:
        function: A function whose first argument, ``tensor``, is nested tensors. If shapes differ, calls of the
            decorated function raise ``DistributedOperationException`` on every rank.

    Examples:
        ```python
        import torch
        from lockstep import PartialState
        from lockstep.utils import DistributedOperationException, verify_operation

        @verify_operation
        def add_up(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.sum()

        state = PartialState()
        try:
            add_up(torch.ones(2 + state.process_index))  # another shape on each rank
            assert state.num_processes == 1
        except DistributedOperationException as error:
            print(error)
        ```
    """

    @functools.wraps(function)
    def verified(*args: OperationArgs.args, **kwargs: OperationArgs.kwargs) -> Reduced:
        tensor = args[0] if args else kwargs["tensor"]
        shapes = gather_object([get_shape(tensor)]) if process.start_runtime().world_size > 1 else []
        if any(shape != shapes[0] for shape in shapes):
            rows = ", ".join(f"rank {rank}: {shape}" for rank, shape in enumerate(shapes))
            raise DistributedOperationException(
                f"{function.__name__} got tensors of different shapes ({rows}). Pass tensors of one shape, or pad them."
            )
        return function(*args, **kwargs)

    return verified


def chained_operation(
    function: Callable[OperationArgs, Reduced],
) -> Callable[OperationArgs, Reduced]:
    """Decorate a function so that a ``DistributedOperationException`` that it raises begins with its name.

    Args:
        function: The function.

    Examples:
        ```python
        from lockstep.utils import DistributedOperationException, chained_operation

        @chained_operation
        def add_up() -> None:
            raise DistributedOperationException("The shapes differ.")

        try:
            add_up()
        except DistributedOperationException as error:
            assert str(error) == "In add_up: The shapes differ."
        ```
    """

    @functools.wraps(function)
    def named(*args: OperationArgs.args, **kwargs: OperationArgs.kwargs) -> Reduced:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            raise DistributedOperationException(f"In {function.__name__}: {error}") from error

    return named


@contextmanager
def GatheredParameters(
    params: torch.Tensor | Iterable[torch.Tensor],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Inside of the block, sharded parameters are whole on every rank. Enter it on every rank.

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
