"""Tensors that are made to be gathered or reduced: values against formulas, counted copies, and ranks that differ."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lockstep.errors import CollectiveMismatchError
from lockstep.shared_memory import ADDRESS_BYTES, GatheredBuffers, RankSlots, Segment
from tests.patching import module_of
from tests.shared_memory.test_group import Onlooker, group_of_all, numbers


def gather(
    group: Any, size: int, dtype: torch.dtype, is_made_here: bool = True, is_async: bool = False
) -> Tensor:
    """The ranks' numbers, each rank's at its place."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    output = group.gathered.allocate(size * ranks, dtype)
    if not is_made_here:  # as where the memory is still in use
        output = group.gathered.give(torch.empty(size * ranks, dtype=dtype))
    mine = output[rank * size : (rank + 1) * size]
    mine.copy_(numbers(rank, size, dtype))
    work = dist.all_gather_into_tensor(output, mine, group=group, async_op=is_async)
    if work is not None:
        work.wait()
    return output


def reduce(group: Any, size: int, dtype: torch.dtype, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """This rank's part of the sum of all ranks' numbers."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = group.reduced.allocate(size * ranks, dtype)
    whole.copy_(numbers(rank, size * ranks, dtype))
    out = torch.empty(size, dtype=dtype)
    dist.reduce_scatter_tensor(out, whole, op, group=group)
    return out


def is_gathered(found: Tensor, size: int, dtype: torch.dtype) -> bool:
    return torch.equal(found, torch.cat([numbers(r, size, dtype) for r in range(dist.get_world_size())]))


def is_reduced(found: Tensor, size: int, dtype: torch.dtype, op: Any = dist.ReduceOp.SUM) -> bool:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total, *others = [numbers(r, size * ranks, dtype)[rank * size : (rank + 1) * size] for r in range(ranks)]
    for part in others:
        total = total + part
    return torch.equal(found, total / ranks if op == dist.ReduceOp.AVG else total)


SIZES = (5, 40_000, 300_000, 7, 300_001, 40_000, 0, 300_000, 5, 5, 5, 5)


def values(seen: bool) -> list[str]:
    group_of_all()
    with Onlooker() if seen and dist.get_rank() == 0 else nullcontext():
        return wrong_values()


def wrong_values() -> list[str]:
    group = group_of_all()
    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for number, size in enumerate(SIZES):
            if not is_gathered(gather(group, size, dtype, is_async=number % 2 == 0), size, dtype):
                wrong.append(f"gathered {dtype} {size}")
            op = dist.ReduceOp.AVG if dtype.is_floating_point and number % 2 else dist.ReduceOp.SUM
            if not is_reduced(reduce(group, size, dtype, op), size, dtype, op):
                wrong.append(f"reduced {dtype} {size}")
    return wrong


@pytest.mark.parametrize(("ranks", "seen"), [(2, True), (3, False)])
def test_gathers_and_sums_are_those_of_formulas(run_distributed, ranks: int, seen: bool) -> None:
    """``seen``: a dispatch mode looks on, on one rank."""
    assert run_distributed(values, ranks, seen) == [[]] * ranks


def copies() -> list[int]:
    """Bytes that a rank copies into its slot and out of others' in the first, and in each later pair of calls."""
    group, found = group_of_all(), []
    for _ in range(6):
        with (
            mock.patch.object(RankSlots, "put", autospec=True, side_effect=RankSlots.put) as put,
            mock.patch.object(RankSlots, "take", autospec=True, side_effect=RankSlots.take) as take,
        ):
            gather(group, 200_000, torch.float32)
            reduce(group, 200_000, torch.float32)
        found.append(
            sum(call.args[2] for call in put.mock_calls) + sum(call.args[3] for call in take.mock_calls)
        )
    return found


def test_only_the_first_calls_of_a_size_copy_from_rank_to_rank(run_distributed) -> None:
    for found in run_distributed(copies, 2):
        # own part and the other's of the gather, own part of the sum, and twice where the memory is
        assert found[0] == 3 * 800_000 + 2 * ADDRESS_BYTES
        assert found[1:] == [0] * 5


def held() -> list[bool]:
    """Outputs that are kept keep their values, whatever is gathered after them."""
    group = group_of_all()
    sizes = [1000 + number for number in range(12)]
    kept = [(size, gather(group, size, torch.float32)) for size in sizes]
    later = [(size, gather(group, size, torch.float32)) for size in sizes]
    return [is_gathered(output, size, torch.float32) for size, output in [*kept, *later]]


def mixed() -> list[bool]:
    """Calls for which some ranks have their tensors elsewhere."""
    group, found = group_of_all(), []
    kept: list[Tensor] = []
    for number in range(24):
        output = gather(group, 2000, torch.float32, is_made_here=number % 3 != dist.get_rank())
        found.append(is_gathered(output, 2000, torch.float32))
        if number % 5 == dist.get_rank():
            kept.append(output)  # for some time on this rank alone
        if number % 7 == 6:
            kept.clear()
    return found + [is_gathered(output, 2000, torch.float32) for output in kept]


def abandoned() -> list[bool]:
    """One rank asks for a tensor where a mode looks on, which may refuse the call, and does not gather it."""
    group, found = group_of_all(), []
    kept: list[Tensor] = []
    for number in range(24):
        if number % 3 == dist.get_rank():
            with Onlooker():
                kept.append(group.gathered.allocate(1000 * dist.get_world_size(), torch.float32).fill_(-1.0))
        output = gather(group, 2000 + number, torch.float32)
        later = gather(group, 1000 + number, torch.float32)
        found.append(is_gathered(output, 2000 + number, torch.float32))
        found.append(is_gathered(later, 1000 + number, torch.float32))
        kept = kept[-2:]
    return found


def too_large() -> tuple[list[bool], int, int]:
    group = group_of_all()
    with mock.patch.object(module_of(GatheredBuffers), "LARGEST_BYTES", 1000):
        found = [is_gathered(gather(group, 500, torch.float32), 500, torch.float32) for _ in range(3)]
        found += [is_reduced(reduce(group, 500, torch.float32), 500, torch.float32) for _ in range(3)]
    return found, group.gathered.capacity, group.reduced.capacity


def test_large_tensors_take_no_memory_that_stays(run_distributed) -> None:
    for found, *capacities in run_distributed(too_large, 2):
        assert all(found)
        assert capacities == [0, 0]


def without_memory() -> list[bool]:
    """One rank cannot map it."""
    group = group_of_all()
    fails = OSError("no such memory") if dist.get_rank() == 1 else None
    with mock.patch.object(Segment, "open", wraps=Segment.open, side_effect=fails):
        return [is_gathered(gather(group, 500, torch.float32), 500, torch.float32) for _ in range(3)]


def forked() -> list[bool]:
    """A forked process ends with a copy of a gathered tensor, which this one still reads."""
    group = group_of_all()
    output = gather(group, 100, torch.float32)
    output = gather(group, 100, torch.float32)
    word = group.gathered.word(dist.get_rank(), group.gathered._calls % group.gathered.count)
    child = os.fork()
    if child == 0:
        del output
        os._exit(0)
    os.waitpid(child, 0)
    return [bool(group.gathered.words[word]), is_gathered(output, 100, torch.float32)]


def mismatched() -> str:
    """One rank gathers other tensors than the rest."""
    group = group_of_all()
    try:
        gather(group, 100 + 100 * (dist.get_rank() == 1), torch.float32)
    except CollectiveMismatchError as error:
        return str(error)
    return ""


def test_gathers_of_other_sizes_are_refused_on_every_rank(run_distributed) -> None:
    for message in run_distributed(mismatched, 2):
        assert "rank 0: all_gather() of 100" in message
        assert "rank 1: all_gather() of 200" in message


def sharded_by_hand() -> list[bool]:
    """``fully_shard`` by hand, whose own collectives know nothing of this memory, beside gathers in it."""
    group = group_of_all()
    torch.manual_seed(0)
    model, alone = nn.Linear(64, 64), nn.Linear(64, 64)
    alone.load_state_dict(model.state_dict())
    fully_shard(model)
    found = []
    for step in range(3):
        batch = torch.ones(4, 64) * (step + 1)
        found.append(torch.equal(model(batch), alone(batch)))
        found.append(is_gathered(gather(group, 64, torch.float32), 64, torch.float32))
    return found


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        pytest.param(held, 3, id="a tensor that is kept does not change"),
        pytest.param(mixed, 3, id="ranks may have their tensors in different memory"),
        pytest.param(abandoned, 3, id="a rank may ask for a tensor and not gather it"),
        pytest.param(without_memory, 3, id="where a rank cannot map the memory all go on without"),
        pytest.param(forked, 2, id="a forked process does not free what its parent reads"),
        pytest.param(sharded_by_hand, 2, id="other calls of the group are not touched"),
    ],
)
def test_each_rank_has_the_numbers_of_all(
    run_distributed, case: Callable[[], list[bool]], ranks: int
) -> None:
    assert [all(found) for found in run_distributed(case, ranks)] == [True] * ranks
