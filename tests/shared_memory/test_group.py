"""Collectives through shared memory: values against formulas and gloo, and what happens when a rank fails."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.errors import CollectiveMismatchError, UsageError
from lockstep.runtime import end_runtime, start_runtime
from lockstep.shared_memory import SLOT_BYTES, share
from tests.patching import module_of
from tests.shared_memory.fuzzing import Fuzzer


def group_of_all(timeout_s: float = 60) -> Any:
    start_runtime(cpu=True)
    return dist.new_group(backend="shm", timeout=timedelta(seconds=timeout_s))


class Onlooker(TorchDispatchMode):
    """A mode that sees operators and changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def fuzz(seed: int, calls: int, largest: int, seen: bool = False) -> int:
    start_runtime(cpu=True)
    with Onlooker() if seen else nullcontext():
        made = Fuzzer(seed, largest).run(calls)
    dist.barrier()
    return made


@pytest.mark.parametrize(("ranks", "seen"), [(2, False), (3, True), (4, False)])
def test_random_calls_give_the_values_of_formulas_and_of_gloo(
    run_distributed, ranks: int, seen: bool
) -> None:
    assert min(run_distributed(fuzz, ranks, ranks, 600, 200_000, seen)) > 300


SIZES = (0, 1, 7, SLOT_BYTES // 4 - 1, SLOT_BYTES // 4 + 1, 300_000)


def numbers(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(31 * rank + size)).to(dtype)


def sums() -> list[str]:
    """Of all-reduces and reduce-scatters, those that are not the ranks' values added in the order of the ranks."""
    group = group_of_all()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for size in SIZES:
            parts = [numbers(other, size * ranks, dtype) for other in range(ranks)]
            expected = parts[0].clone()
            for part in parts[1:]:
                expected = expected + part
            summed = parts[rank].clone()
            dist.all_reduce(summed, group=group)
            scattered = torch.empty(size, dtype=dtype)
            dist.reduce_scatter_tensor(scattered, parts[rank], group=group)
            if not torch.equal(summed, expected):
                wrong.append(f"all_reduce {dtype} {size}")
            if not torch.equal(scattered, expected[size * rank : size * (rank + 1)]):
                wrong.append(f"reduce_scatter {dtype} {size}")
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_taken_in_the_order_of_the_ranks_bit_for_bit(run_distributed, ranks: int) -> None:
    assert run_distributed(sums, ranks) == [[]] * ranks


def scaled_sums() -> list[bool]:
    """Whether PREMUL_SUM is the sum of the multiplied values."""
    group = group_of_all()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = [torch.arange(5000.0 * ranks) + other for other in range(ranks)]
    expected = sum(part * 0.5 for part in parts)
    half = dist._make_nccl_premul_sum(0.5)
    found = []
    for _ in range(5):
        reduced, summed, out = parts[rank].clone(), parts[rank].clone(), torch.empty(5000)
        dist.reduce(reduced, 0, half, group=group)
        dist.all_reduce(summed, half, group=group)
        dist.reduce_scatter_tensor(out, parts[rank], half, group=group)
        found += [
            torch.equal(reduced, expected if rank == 0 else parts[rank]),
            torch.equal(summed, expected),
            torch.equal(out, expected[5000 * rank : 5000 * (rank + 1)]),
        ]
    return found


def test_sums_of_multiplied_values(run_distributed) -> None:
    for found in run_distributed(scaled_sums, 3):
        assert all(found), found


def message_of(function: Callable[[], object], kind: type[BaseException]) -> str:
    try:
        function()
    except kind as error:
        return str(error)
    return ""


def exchange(sent: list[list[int]], group: dist.ProcessGroup) -> None:
    """``sent[r]``: how many elements rank r sends to each rank. Each takes one of each."""
    mine = sent[dist.get_rank()]
    dist.all_to_all_single(torch.zeros(3), torch.ones(sum(mine)), [1, 1, 1], mine, group=group)


def mismatched(kind: str) -> tuple[str, str]:
    """What a rank is told when it calls something else than rank 0 does, and of its next call."""
    group, is_first = group_of_all(), dist.get_rank() == 0
    x = torch.ones(4)
    calls: dict[str, Callable[[], object]] = {
        "kind": lambda: dist.all_reduce(x, group=group) if is_first else dist.broadcast(x, 0, group=group),
        "size": lambda: dist.all_reduce(x if is_first else x[:3], group=group),
        "dtype": lambda: dist.all_reduce(x if is_first else x.int(), group=group),
        "root": lambda: dist.broadcast(x, 0 if is_first else 1, group=group),
        "operation": lambda: dist.all_reduce(
            x, dist.ReduceOp.SUM if is_first else dist.ReduceOp.MAX, group=group
        ),
        "splits": lambda: exchange([[1, 2, 1], [1, 1, 1], [1, 1, 1]], group),
        "own split": lambda: exchange([[1, 1, 1], [1, 1, 1], [1, 1, 2]], group),
    }
    first = message_of(calls[kind], CollectiveMismatchError)
    return first, message_of(lambda: dist.barrier(group=group), CollectiveMismatchError)


@pytest.mark.parametrize("kind", ["kind", "size", "dtype", "root", "operation", "splits", "own split"])
def test_calls_that_do_not_belong_together_raise_on_every_rank(run_distributed, kind: str) -> None:
    names = {"kind": "broadcast", "size": "3", "dtype": "int32", "root": "rank 1", "operation": "MAX"}
    names["splits"] = "rank 0 sends 8 bytes to rank 1, which takes 4"
    names["own split"] = "rank 2 sends 8 bytes to rank 2, which takes 4"
    for message, later in run_distributed(mismatched, 3, kind):
        first = "Rank 0 called all_reduce (test_group.py:" if kind == "kind" else "rank 0: all_reduce"
        assert first in message or kind in ("root", "splits", "own split")
        assert names[kind] in message
        assert later == message  # nobody knows where the others are


def late_and_alone() -> tuple[str, str, float]:
    """What a rank is told that waits for one that does not come, and when a rank aborts."""
    slow, left = group_of_all(0.5), group_of_all()
    rank = dist.get_rank()
    started = time.monotonic()
    late = message_of(lambda: dist.all_reduce(torch.ones(2), group=slow), RuntimeError) if rank == 0 else ""
    took = time.monotonic() - started
    dist.barrier()
    if rank == 1:
        left.abort()
        return late, "", took
    return late, message_of(lambda: dist.all_reduce(torch.ones(2), group=left), RuntimeError), took


def test_a_rank_that_does_not_come_and_one_that_aborts_are_named(run_distributed) -> None:
    (late, aborted, took), _ = run_distributed(late_and_alone, 2)
    assert "Timed out" in late and "rank 1" in late and "all_reduce" in late
    assert took < 30
    assert "Rank 1 aborted" in aborted


def refused_tensors() -> list[str]:
    group = group_of_all()
    x = torch.ones(4)
    calls: list[Callable[[], object]] = [
        lambda: dist.broadcast(torch.empty(4, device="meta"), 0, group=group),
        lambda: dist.all_reduce(x.bool(), dist.ReduceOp.AVG, group=group),
        lambda: dist.all_reduce(x, dist.ReduceOp.BAND, group=group),
        lambda: dist.all_to_all_single(torch.empty(3), torch.empty(3), group=group),
        lambda: dist.all_gather_into_tensor(torch.empty(9), x, group=group),
        lambda: dist.broadcast(torch.sparse_coo_tensor([[0]], [1.0], (4,)), 0, group=group),
    ]
    messages = [message_of(call, (UsageError, ValueError)) for call in calls]  # type: ignore[arg-type]
    dist.all_reduce(x, group=group)  # none of them was half done
    assert x.tolist() == [2.0] * 4
    return messages


def test_what_it_cannot_carry_is_refused_before_anything_is_sent(run_distributed) -> None:
    for messages in run_distributed(refused_tensors, 2):
        assert all(messages), messages


def sparse_sum() -> tuple[Tensor, Tensor]:
    group = group_of_all()
    rank = dist.get_rank()
    mine = torch.sparse_coo_tensor([[rank, 3]], [[1.0, 2.0], [rank, rank]], (5, 2))
    dense = mine.to_dense()
    dist.all_reduce(mine, group=group)
    dist.all_reduce(dense, group=group)
    return mine.to_dense(), dense


def test_sparse_tensors_are_summed(run_distributed) -> None:
    for sparse, dense in run_distributed(sparse_sum, 3):
        assert torch.equal(sparse, dense)


def calls_in_callbacks() -> list[float]:
    """A callback of one call that waits for a later one, itself run by a callback, as PowerSGD does."""
    group = group_of_all()
    x, y, z = (torch.full((300_000,), float(1 + dist.get_rank() + number)) for number in range(3))

    def deepest(future: Any) -> Tensor:
        dist.all_reduce(z, group=group)
        return z

    def then(future: Any) -> Tensor:
        later = dist.all_reduce(y, group=group, async_op=True).get_future()
        return later.then(deepest).wait()

    future = dist.all_reduce(x, group=group, async_op=True).get_future().then(then)
    future.wait()
    return [tensor[0].item() for tensor in (x, y, z)]


def first_of_two_messages() -> list[float]:
    """Rank 0 waits for one message while its group's thread goes on with the next, which is sent after that."""
    group = group_of_all()
    first, second = torch.empty(3), torch.empty(3)
    if dist.get_rank() == 1:
        dist.barrier()
        dist.send(torch.full((3,), 5.0), 0, group=group, tag=1)
        dist.barrier()
        dist.send(torch.full((3,), 7.0), 0, group=group, tag=2)
        return [5.0, 7.0]
    works = [dist.irecv(one, 1, group=group, tag=tag) for tag, one in ((1, first), (2, second))]
    dist.barrier()
    works[0].wait()
    dist.barrier()
    works[1].wait()
    return [first[0].item(), second[0].item()]


def left_while_waiting() -> str:
    group = group_of_all()
    if dist.get_rank() == 1:
        dist.barrier()
        return ""
    work = dist.irecv(torch.empty(3), 1, group=group)
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError) as raised:
        work.wait()
    dist.barrier()
    return str(raised.value)


def test_a_call_that_is_not_done_when_its_group_is_left_raises(run_distributed) -> None:
    message, _ = run_distributed(left_while_waiting, 2)
    assert message.startswith("This process has left the process group before recv of [3]")


def last_message() -> float:
    """Rank 0 sends and leaves the group before the other one receives."""
    group = group_of_all()
    if dist.get_rank() == 0:
        dist.send(torch.full((3,), 5.0), 1, group=group)
        dist.destroy_process_group(group)
        dist.barrier()
        return 5.0
    dist.barrier()
    received = torch.empty(3)
    dist.recv(received, 0, group=group)
    return received[0].item()


def leaves_at_once() -> int:
    """Rank 0, whose process serves the store, starts and leaves; rank 1 reads late what was exchanged."""
    join = module_of(share)
    read_in_time = join.exchange

    def read_late(store: Any, key: str, rank: int, ranks: int, text: str) -> list[str]:
        store.set(f"{key}/{rank}", text)
        time.sleep(0.5 if key == "mapped" and rank == 1 else 0)
        return read_in_time(store, key, rank, ranks, text)

    with mock.patch.object(join, "exchange", read_late):
        size = start_runtime(cpu=True).world_size
    end_runtime()
    return size


def without_gradients() -> tuple[float, int]:
    group = group_of_all()
    with torch.inference_mode():
        inside = torch.ones(3)
        dist.all_reduce(inside, group=group)
    leaf = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        dist.broadcast(leaf, 0, group=group)
    return inside.sum().item(), leaf.numel()


@contextmanager
def on_hosts(names: str) -> Iterator[None]:
    """Within it ranks say that they are on these hosts, a letter for each rank."""
    join = module_of(share)
    original, join.host_of_process = join.host_of_process, lambda: names[dist.get_rank()]
    try:
        yield
    finally:
        join.host_of_process = original


def on_other_hosts() -> tuple[str, list[float]]:
    start_runtime(cpu=True)
    with on_hosts("aab"):
        group = dist.new_group(backend="shm")
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    return type(group._get_backend(torch.device("cpu"))).__name__, x.tolist()


def kept_after_calls() -> int:
    """Bytes of tensors that are still there when nobody but the group could have kept them."""
    group = group_of_all()
    storages = []
    for async_op in (False, True) * 40:
        x = torch.ones(1000)
        storages.append(weakref.ref(x.untyped_storage()))
        work = dist.all_reduce(x, group=group, async_op=async_op)
        if async_op:
            work.wait()
        del x, work
    gc.collect()
    deadline = time.monotonic() + 10  # the group's thread lets go a moment after it was done
    while any(one() is not None for one in storages) and time.monotonic() < deadline:
        time.sleep(0.01)
    return sum(one() is not None for one in storages)


def overlapping(kind: str) -> list[Tensor]:
    values = torch.arange(1.0, 13.0) * (dist.get_rank() + 1)
    square = values[:9].view(3, 3)
    return {
        "the same twice": [values, values],
        "three times": [values, values, values],
        "parts that overlap": [values[:8], values[4:]],
        "parts beside each other": [values[:6], values[6:]],
        "a part first": [values[2:5], values],
        "turned": [square.t(), square],
        "turned, second": [square, square.t()],
    }[kind]


OVERLAPS = (
    "the same twice", "three times", "parts that overlap", "parts beside each other", "a part first", "turned",
    "turned, second",
)  # fmt: skip


def reduced_together() -> list[bool]:
    start_runtime(cpu=True)
    groups = [dist.new_group(backend=backend) for backend in ("shm", "gloo")]
    found = []
    for kind in OVERLAPS:
        mine, expected = overlapping(kind), overlapping(kind)
        for tensors, group in zip((mine, expected), groups, strict=True):
            dist.all_reduce_coalesced(tensors, group=group)
        found.append(all(map(torch.equal, mine, expected)))
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensors_of_one_call_may_share_memory(run_distributed: Any, ranks: int) -> None:
    """As gloo does it, which copies all tensors before it reduces them."""
    assert run_distributed(reduced_together, ranks) == [[True] * len(OVERLAPS)] * ranks


def receive_from_any() -> str:
    with pytest.raises(UsageError) as error:
        dist.recv(torch.ones(3), group=group_of_all())
    return str(error.value)


def test_a_message_from_any_rank_is_refused(run_distributed: Any) -> None:
    assert all("Name the rank that sends it" in said for said in run_distributed(receive_from_any, 2))


@pytest.mark.parametrize(
    ("case", "ranks", "answer"),
    [
        pytest.param(calls_in_callbacks, 2, [3.0, 5.0, 7.0], id="a callback may wait for later calls"),
        pytest.param(
            first_of_two_messages, 2, [5.0, 7.0], id="who waits for a message does not for the next"
        ),
        pytest.param(last_message, 2, 5.0, id="a message arrives after its sender has left"),
        pytest.param(leaves_at_once, 2, 2, id="a rank may leave as soon as it has joined"),
        pytest.param(without_gradients, 2, (6.0, 3), id="inference mode and leaves are taken"),
        pytest.param(
            on_other_hosts, 3, ("ProcessGroupGloo", [3.0] * 2), id="ranks on different hosts use gloo"
        ),
        pytest.param(kept_after_calls, 2, 0, id="tensors of calls that are done are let go"),
    ],
)
def test_each_rank_has_the_answer(
    run_distributed: Any, case: Callable[[], object], ranks: int, answer: object
) -> None:
    assert run_distributed(case, ranks) == [answer] * ranks
