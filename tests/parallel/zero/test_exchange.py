"""The collectives that sharded models use on the CPU give what torch's own give, with the same bytes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep import Accelerator, InitProcessGroupKwargs
from lockstep.errors import UsageError
from lockstep.parallel.zero import BroadcastAllGather, ExchangeReduceScatter
from lockstep.shared_memory import RankSlots
from tests.patching import module_of
from tests.refusals import expect_refusal

LENGTH = 5


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def accelerator_on(backend: str) -> Accelerator:
    return Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=backend)])


def collectives(dtype: torch.dtype, backend: str) -> dict[str, Any]:
    accelerator = accelerator_on(backend)
    rank, ranks = accelerator.process_index, accelerator.num_processes
    group: Any = dist.group.WORLD
    mine = values(rank, ranks * LENGTH, dtype)
    results: dict[str, Any] = {}
    with accelerator.communication() as counter:
        gathered = torch.empty(ranks * LENGTH, dtype=dtype)
        BroadcastAllGather()(gathered, mine[:LENGTH], group)
    results["gathered"], results["gather_bytes"] = gathered, counter.wire_bytes()
    in_place = torch.empty(ranks * LENGTH, dtype=dtype)
    part = in_place.chunk(ranks)[rank].copy_(mine[:LENGTH])
    BroadcastAllGather()(in_place, part, group)
    results["in_place"] = in_place
    for op in ("SUM", "AVG"):
        reduced = torch.empty(LENGTH, dtype=dtype)
        with accelerator.communication() as counter:
            ExchangeReduceScatter()(reduced, mine, group, getattr(dist.ReduceOp, op))
        results[op], results["reduce_bytes"] = reduced, counter.wire_bytes()
    # Gradients that no rank has are sent as negative zeros.
    zeros = torch.full((ranks * LENGTH,), -0.0, dtype=dtype)
    part = torch.empty(LENGTH, dtype=dtype)
    ExchangeReduceScatter()(part, zeros, group, dist.ReduceOp.AVG)
    dist.all_reduce(zeros)
    results["signs"] = torch.cat([part, zeros]).signbit()
    expect_refusal(UsageError, "MAX", ExchangeReduceScatter(), reduced, mine, group, dist.ReduceOp.MAX)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_results_are_those_of_the_definition(
    run_distributed, world_size: int, backend: str, dtype: torch.dtype
) -> None:
    all_values = [values(rank, world_size * LENGTH, dtype) for rank in range(world_size)]
    expected = torch.cat([one[:LENGTH] for one in all_values])
    total = torch.stack(all_values).double().sum(0)
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    wire = (world_size - 1) * LENGTH * expected.element_size()
    for rank, found in enumerate(run_distributed(collectives, world_size, dtype, backend)):
        assert torch.equal(found["gathered"], expected)
        assert torch.equal(found["in_place"], expected)
        part = total.chunk(world_size)[rank]
        torch.testing.assert_close(found["SUM"].double(), part, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(found["AVG"].double(), part / world_size, rtol=tolerance, atol=tolerance)
        assert found["gather_bytes"] == found["reduce_bytes"] == wire
        assert found["signs"].all()


def with_fewer_ranks_allowed(backend: str) -> list[torch.Tensor]:
    accelerator = accelerator_on(backend)
    rank, ranks = accelerator.process_index, accelerator.num_processes
    group: Any = dist.group.WORLD
    mine = values(rank, ranks * LENGTH)
    results = []
    exchange = module_of(ExchangeReduceScatter)
    for most in (exchange.MOST_RANKS, 1):
        exchange.MOST_RANKS = most
        gathered, reduced = torch.empty(ranks * LENGTH), torch.empty(LENGTH)
        with accelerator.communication() as counter:
            BroadcastAllGather()(gathered, mine[:LENGTH], group)
            ExchangeReduceScatter()(reduced, mine, group, dist.ReduceOp.AVG)
        results += [
            gathered,
            reduced,
            torch.tensor([counter.count("all_gather"), counter.count("reduce_scatter")]),
        ]
    exchange.MOST_RANKS = 8
    return results


@pytest.mark.parametrize(("backend", "own_calls"), [("gloo", [0, 0]), ("shm", [1, 1])])
def test_larger_groups_and_those_that_share_memory_use_the_backends_own(
    run_distributed, backend: str, own_calls: list[int]
) -> None:
    for ours_gathered, ours_reduced, calls, gathered, reduced, both in run_distributed(
        with_fewer_ranks_allowed, 2, backend
    ):
        assert calls.tolist() == own_calls
        assert both.tolist() == [1, 1]
        assert torch.equal(ours_gathered, gathered)
        torch.testing.assert_close(ours_reduced, reduced)


WIDTH = 256


def copied_in_a_step(parallel: str) -> tuple[int, list[torch.Tensor]]:
    """Bytes that this rank copies for or from others in the third step, and the weights after it."""
    accelerator = Accelerator(cpu=True, parallel=parallel)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(accelerator.process_index))
    copied = 0
    for _ in range(3):
        with (
            mock.patch.object(RankSlots, "put", autospec=True, side_effect=RankSlots.put) as put,
            mock.patch.object(RankSlots, "take", autospec=True, side_effect=RankSlots.take) as take,
        ):
            optimizer.zero_grad()
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
        copied = sum(call.args[2] for call in put.mock_calls) + sum(call.args[3] for call in take.mock_calls)
    return copied, [p.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_copies_no_weights_and_no_gradients_from_rank_to_rank(run_distributed, stage: int) -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    batches = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    for _ in range(3):
        alone.zero_grad()
        (sum(alone(batch).square().mean() for batch in batches) / 2).backward()
        with torch.no_grad():
            for parameter in alone.parameters():
                parameter -= 0.1 * parameter.grad
    for copied, weights in run_distributed(copied_in_a_step, 2, f"zero={stage}"):
        assert copied < 4 * WIDTH  # which parameters were used, and the number of the loop's call
        torch.testing.assert_close(weights, [p.detach() for p in alone.parameters()], rtol=1e-5, atol=1e-7)
