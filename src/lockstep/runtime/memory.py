"""Running out of device memory: recognise it, free what is free, try again with a smaller batch."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch

from lockstep.errors import UsageError

# What torch and its libraries say when an allocation fails, or when cuDNN finds no algorithm that fits.
_OUT_OF_MEMORY = (
    "out of memory",
    "DefaultCPUAllocator",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(exception: BaseException) -> bool:
    """Return whether ``exception`` says that a device or the CPU had no memory left.

    Examples:
        ```python
        from lockstep.utils import should_reduce_batch_size

        assert should_reduce_batch_size(RuntimeError("CUDA out of memory."))
        assert not should_reduce_batch_size(RuntimeError("a wrong shape"))
        ```
    """
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(exception, RuntimeError) and any(text in str(exception) for text in _OUT_OF_MEMORY)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give device memory that torch has cached back to the driver. Without an accelerator, nothing happens.

    Args:
        garbage_collection: Call ``gc.collect()`` first. That is slow.

    Examples:
        ```python
        from lockstep.utils import clear_device_cache

        large = bytearray(1_000_000)
        del large
        clear_device_cache(garbage_collection=True)  # nothing to do without an accelerator
        ```
    """
    if garbage_collection:
        gc.collect()
    # An uninitialised CUDA has no cache, and asking for it would create a context.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
    elif torch.xpu.is_available():
        torch.xpu.empty_cache()


def release_memory(*objects: object) -> list[None]:
    """Free device memory, and return a list with one None for each object.

    Memory is freed only if no variable refers to an object any more. So assign the result to your variables: ``model,
    optimizer = release_memory(model, optimizer)``.

    Args:
        objects: Models, optimizers, tensors of any shape and so on.

    Examples:
        ```python
        import torch
        from lockstep.utils import release_memory

        model, batch = torch.nn.Linear(4, 1), torch.randn(8, 4)
        model, batch = release_memory(model, batch)  # the names no longer hold them
        assert model is None and batch is None
        ```
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def find_executable_batch_size(
    function: Callable[..., object] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorate a function so that it is called with smaller and smaller batch sizes until it no longer runs out of
    memory.

    The decorated function is called without the batch size. A size that failed is not tried again in later calls.
    On several ranks, each decides by itself. ``lockstep tune`` finds one size that fits on every rank.

    Args:
        function: A function whose first argument is the batch size. Without it, the result is a decorator.
        starting_batch_size: The first batch size.
        reduce_batch_size_fn: A function without arguments that returns the next batch size after a failure. None: the
            next one is ``int(batch_size * 0.9)``.

    Raises:
        TypeError: the decorated function was called with the batch size as well.
        UsageError: the batch size has reached zero.

    Examples:
        ```python
        from lockstep import find_executable_batch_size

        @find_executable_batch_size(starting_batch_size=64)
        def train(batch_size: int) -> int:
            if batch_size > 48:  # stands for a model that is too big
                raise MemoryError("out of memory")
            return batch_size

        assert train() <= 48
        ```
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    batch_size = starting_batch_size

    @functools.wraps(function)
    def with_batch_size(*args: object, **kwargs: object) -> object:
        nonlocal batch_size
        clear_device_cache(garbage_collection=True)
        failure: str | None = None
        while batch_size > 0:
            try:
                return function(batch_size, *args, **kwargs)
            except Exception as exception:
                if not is_out_of_memory(exception):
                    raise
                failure = str(exception)
            # Outside of the handler: its traceback kept the failed call's tensors alive.
            clear_device_cache(garbage_collection=True)
            batch_size = int(batch_size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        last = f" The last failure was: {failure}" if failure else ""
        raise UsageError(
            "No executable batch size found, reached zero. "
            f"Use a smaller model or input, or free memory before the call.{last}"
        )

    return with_batch_size
