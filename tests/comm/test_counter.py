"""The counter against the ring formulas and plainly counted parameters."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lockstep.comm import CommCounter
from lockstep.runtime import start_runtime
from tests.refusals import expect_refusal


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))


def ddp_steps(hook: str | None, bucket_cap_mb: float = 0.1) -> tuple[float, int, set[str]]:
    """Wire bytes of one DDP step after warm-up, the number of all-reduces, and the operations seen."""
    start_runtime(cpu=True)
    ddp = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=bucket_cap_mb)
    if hook == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if hook == "power_sgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):  # buckets are rebuilt after the first step; PowerSGD starts after its second
        with CommCounter() as counter:
            ddp(torch.randn(4, 64)).sum().backward()
    return counter.wire_bytes(), counter.count("all_reduce"), {one.operation for one in counter.records}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("hook", "bytes_per_parameter"), [(None, 4), ("fp16", 2)])
def test_a_ddp_step_sends_what_the_ring_formula_says(run_distributed, world_size, hook, bytes_per_parameter):
    parameters = 64 * 256 + 256 + 256 * 256 + 256 + 256 * 8 + 8
    expected = 2 * (world_size - 1) / world_size * bytes_per_parameter * parameters
    for wire_bytes, buckets, operations in run_distributed(ddp_steps, world_size, hook):
        assert wire_bytes == pytest.approx(expected, rel=0.01)
        assert buckets > 1 and operations == {"all_reduce"}


def test_power_sgd_sends_its_factors_and_the_biases(run_distributed):
    factors = (64 + 256) + (256 + 256) + (256 + 8)  # rank 1: a column and a row per matrix
    biases = 256 + 256 + 8
    for wire_bytes, all_reduces, _ in run_distributed(ddp_steps, 2, "power_sgd", bucket_cap_mb=25):
        assert wire_bytes == 4 * (factors + biases)
        assert all_reduces == 3


def every_operation() -> dict[str, tuple[int, int, float]]:
    start_runtime(cpu=True)
    rank, x = dist.get_rank(), torch.ones(4)
    with CommCounter() as counter:
        dist.all_reduce(x)
        dist.all_gather([torch.empty(4), torch.empty(4)], x)
        dist.all_gather_into_tensor(torch.empty(8), x)
        dist.reduce_scatter_tensor(torch.empty(2), x)
        dist.reduce_scatter(torch.empty(2), [torch.ones(2), torch.ones(2)])
        dist.all_to_all_single(torch.empty(4), x)
        dist.broadcast(x, 0)
        dist.reduce(x.clone(), 0)
        dist.gather(x, [torch.empty(4), torch.empty(4)] if rank == 0 else None)
        dist.scatter(torch.empty(4), [x, x] if rank == 0 else None)
        dist.barrier()
        dist.send(x, 1) if rank == 0 else dist.recv(torch.empty(4), 0)
    names = {one.operation for one in counter.records}
    assert "all_reduce" in counter.table()
    return {
        name: (counter.count(name), counter.payload_bytes(name), counter.wire_bytes(name)) for name in names
    }


def test_every_operation_is_counted_with_its_payload_and_wire_bytes(run_distributed):
    common = {
        "all_reduce": (1, 16, 16.0),
        "all_gather": (2, 64, 32.0),
        "reduce_scatter": (2, 32, 16.0),
        "all_to_all": (1, 16, 8.0),
        "broadcast": (1, 16, 8.0),
        "reduce": (1, 16, 8.0),
        "gather": (1, 32, 8.0),
        "scatter": (1, 32, 8.0),
        "barrier": (1, 0, 0.0),
    }
    rank_0, rank_1 = run_distributed(every_operation, 2)
    assert rank_0 == common | {"send": (1, 16, 16.0)}
    assert rank_1 == common | {"recv": (1, 16, 0.0)}


def functional_collectives() -> tuple[float, float]:
    import torch.distributed._functional_collectives as functional

    start_runtime(cpu=True)
    with CommCounter() as counter:
        functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).sum()
        functional.all_gather_tensor(torch.ones(4), 0, dist.group.WORLD).sum()
    return counter.wire_bytes("all_reduce"), counter.wire_bytes("all_gather")


def test_the_collectives_of_tensor_parallelism_are_counted(run_distributed):
    assert run_distributed(functional_collectives, 2) == [(16.0, 16.0)] * 2


def sub_group() -> float:
    start_runtime(cpu=True)
    group = dist.new_group([0, 1])
    dist.new_group([2, 3])
    with CommCounter() as counter:
        if dist.get_rank() < 2:
            dist.all_reduce(torch.ones(4), group=group)
    dist.barrier()  # rank 0 has the store in which the others meet
    return counter.wire_bytes()


def test_the_size_of_the_group_counts_not_that_of_the_world(run_distributed):
    assert run_distributed(sub_group, 4) == [16.0, 16.0, 0.0, 0.0]


def test_an_unknown_operation_is_refused_with_the_known_ones():
    expect_refusal(ValueError, "all_reduce", CommCounter().count, "allreduce")
