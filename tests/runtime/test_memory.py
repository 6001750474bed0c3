"""Out-of-memory: recognised, retried, given up on."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from lockstep import find_executable_batch_size
from lockstep.errors import UsageError
from lockstep.runtime import is_out_of_memory
from lockstep.utils import clear_device_cache, release_memory


def fails_above(limit: int, tried: list[int]) -> Any:
    def train(batch_size: int, *rest: Any, **options: Any) -> tuple[Any, ...]:
        tried.append(batch_size)
        if batch_size > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return batch_size, rest, options

    return train


def test_the_batch_shrinks_by_a_tenth_until_it_fits_and_is_that_size_from_then_on() -> None:
    tried: list[int] = []
    run = find_executable_batch_size(fails_above(110, tried), starting_batch_size=128)
    assert run("x", key=1) == (103, ("x",), {"key": 1})
    assert run()[0] == 103
    assert tried == [128, 115, 103, 103]


def test_it_decorates_with_and_without_arguments() -> None:
    @find_executable_batch_size
    def plain(batch_size: int) -> int:
        return batch_size

    @find_executable_batch_size(starting_batch_size=16)
    def smaller(batch_size: int, factor: int) -> int:
        """Docs."""
        return batch_size * factor

    assert plain() == 128
    assert smaller(2) == 32
    assert smaller.__doc__ == "Docs."


def test_the_caller_may_say_how_to_shrink() -> None:
    tried: list[int] = []
    run = find_executable_batch_size(fails_above(10, tried), 100, reduce_batch_size_fn=lambda: 8)
    assert run()[0] == 8
    assert tried == [100, 8]


def test_at_zero_it_gives_up_and_shows_the_last_failure() -> None:
    tried: list[int] = []
    with pytest.raises(UsageError, match="2 GiB"):
        find_executable_batch_size(fails_above(0, tried), starting_batch_size=1)()
    assert tried == [1]


def test_other_errors_pass_through_at_once() -> None:
    @find_executable_batch_size
    def train(batch_size: int) -> None:
        raise ValueError("not memory")

    with pytest.raises(ValueError):
        train()


def test_what_the_failed_attempt_held_is_free_at_the_next() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    @find_executable_batch_size(starting_batch_size=10)
    def train(batch_size: int) -> list[Any]:
        alive = [ref() for ref in held]
        big = torch.ones(batch_size)
        held.append(weakref.ref(big))
        if batch_size == 10:
            raise torch.OutOfMemoryError("out of memory")
        return alive

    assert train() == [None]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("any"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear"), True),
        (MemoryError(), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_is_recognised(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_the_error_of_torchs_own_cpu_allocator_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_release_memory_lets_go_of_cycles_and_gives_nones() -> None:
    class Node:
        me: Any = None

    node, other = Node(), Node()
    node.me = node
    seen = weakref.ref(node)
    gc.disable()
    try:
        del node
        assert release_memory(other, other) == [None, None]
        assert seen() is None
    finally:
        gc.enable()


def test_clearing_the_cache_does_not_start_a_device() -> None:
    clear_device_cache()
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()
