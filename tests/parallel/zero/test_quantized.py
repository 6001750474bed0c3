"""Quantised collectives of sharded models against exact means in float64, counted bytes and plain ``fully_shard``."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lockstep.config import QuantizedType
from lockstep.errors import ConfigError, UsageError
from lockstep.parallel.zero import QuantizedAllGather, QuantizedReduceScatter, quantize_collectives
from lockstep.runtime import start_runtime
from tests.refusals import expect_refusal

INT8, INT4 = QuantizedType.INT8, QuantizedType.INT4
LEVELS = {8: 127, 4: 7}
WIDTHS = (13, 61, 37, 3)  # nothing divides by 2, 4 or 256
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(i, o), nn.Tanh()) for i, o in pairwise(WIDTHS)))


def sharded_model(
    weights: QuantizedType | None,
    gradients: QuantizedType | None,
    mesh_shape: tuple[int, ...] | None = None,
    **options: Any,
) -> nn.Sequential:
    names = ("replicate", "shard")[-len(mesh_shape or (1,)) :]
    mesh = init_device_mesh("cpu", mesh_shape or (dist.get_world_size(),), mesh_dim_names=names)
    options = {"reshard_after_forward": True, **options, "mesh": mesh}
    model = plain_model()
    for block in model:
        fully_shard(block, **options)
    fully_shard(model, **options)
    quantize_collectives(model, weights, gradients)
    return model


def rows(rank: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, WIDTHS[0], generator=generator)
    return inputs, torch.stack([inputs[:, :4].sum(1), inputs[:, 4] - 1, inputs[:, 5]], dim=1).mul(0.3).tanh()


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    inputs, targets = rows(dist.get_rank(), step)
    return F.mse_loss(model(inputs).float(), targets)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def peaks(values: torch.Tensor) -> torch.Tensor:
    """For each element of (rows, n) the largest absolute value of its block of 256."""
    return torch.cat([p.abs().amax(-1, keepdim=True).expand_as(p) for p in values.split(256, dim=-1)], dim=-1)


# -- the collectives ------------------------------------------------------------------------------------


def reduced(
    count: int, dtype: torch.dtype, bits: int, name: str, async_op: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result of one rank, the exact one in float64, and the documented bound of their difference."""
    start_runtime(cpu=True)
    rank, size = dist.get_rank(), dist.get_world_size()
    op = ReduceOp.PREMUL_SUM(0.3) if name == "PREMUL_SUM" else getattr(ReduceOp, name)
    generators = [torch.Generator().manual_seed(r) for r in range(size)]
    inputs = [(torch.randn(size, count, generator=g) * 4**r).to(dtype) for r, g in enumerate(generators)]
    own, output = inputs[rank].flatten(), torch.empty(count, dtype=dtype)
    work = QuantizedReduceScatter(bits)(output, own, dist.group.WORLD, op, async_op)
    assert (work is not None) == async_op
    if work is not None:
        assert work.wait() and work.wait()
    assert torch.equal(own, inputs[rank].flatten())
    factor = {"SUM": 1.0, "AVG": 1 / size, "PREMUL_SUM": 0.3}[name]
    mine = torch.stack([one[rank] for one in inputs]).double()
    allowed = (peaks(mine) * (1 / (2 * LEVELS[bits]) + 2.0**-21)).sum(0) * factor
    exact = mine.sum(0) * factor
    return output.double(), exact, allowed + ROUNDING[dtype] * exact.abs()


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize(
    ("count", "dtype", "bits", "name", "async_op"),
    [
        (1001, torch.float32, 8, "AVG", False),
        (1001, torch.float32, 4, "AVG", True),
        (512, torch.float32, 8, "SUM", True),
        (301, torch.bfloat16, 8, "PREMUL_SUM", False),
        (301, torch.float16, 4, "SUM", False),
        (1, torch.float32, 4, "AVG", False),
    ],
)
def test_a_reduced_element_is_off_by_at_most_the_ranks_block_bounds(
    run_distributed, world_size, count, dtype, bits, name, async_op
) -> None:
    for actual, exact, allowed in run_distributed(reduced, world_size, count, dtype, bits, name, async_op):
        assert ((actual - exact).abs() <= allowed).all()


def gathered(dtype: torch.dtype, async_op: bool) -> tuple[torch.Tensor, torch.Tensor]:
    start_runtime(cpu=True)
    group, shard = dist.group.WORLD, torch.randn(1001).mul(dist.get_rank() + 1).to(dtype)
    output = torch.empty(dist.get_world_size() * 1001, dtype=dtype)
    output.chunk(dist.get_world_size())[dist.get_rank()].copy_(shard)
    # As FSDP2 does it: the input is a view of the output.
    own = output.chunk(dist.get_world_size())[dist.get_rank()]
    work = QuantizedAllGather(8, group)(output, own, group, async_op)
    assert (work is not None) == async_op
    if work is not None:
        work.wait()
    return shard, output


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize(
    ("dtype", "async_op"), [(torch.float32, True), (torch.bfloat16, False), (torch.float16, False)]
)
def test_gathered_weights_are_the_same_bits_on_all_ranks_and_within_the_bound(
    run_distributed, world_size, dtype, async_op
) -> None:
    shards, outputs = zip(*run_distributed(gathered, world_size, dtype, async_op), strict=True)
    exact = torch.stack(shards).double()
    allowed = peaks(exact) * (1 / 254 + 2.0**-22) + ROUNDING[dtype] * exact.abs()
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert ((outputs[0].view(world_size, -1).double() - exact).abs() <= allowed).all()


def with_one_bad_gradient(value: float, bits: int, dtype: torch.dtype) -> torch.Tensor:
    start_runtime(cpu=True)
    size = dist.get_world_size()
    gradients = torch.ones(size, 600, dtype=dtype)
    if dist.get_rank() == 1:
        gradients[0, 300] = value  # rank 0 owns it
    output = torch.empty(600, dtype=dtype)
    QuantizedReduceScatter(bits)(output, gradients.flatten(), dist.group.WORLD, ReduceOp.AVG)
    return output.isfinite()


@pytest.mark.parametrize(
    ("value", "bits", "dtype"),
    [(math.inf, 8, torch.float32), (-math.inf, 4, torch.bfloat16), (math.nan, 8, torch.float16)],
)
def test_a_gradient_that_is_not_finite_on_one_rank_is_seen_by_its_owner(
    run_distributed, value, bits, dtype
) -> None:
    owner, *others = run_distributed(with_one_bad_gradient, 4, value, bits, dtype)
    assert owner.tolist() == [True] * 256 + [False] * 256 + [True] * 88
    assert all(other.all() for other in others)


def refused_operations() -> list[str]:
    start_runtime(cpu=True)
    messages = []
    for op in (ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp(ReduceOp.MIN), ReduceOp.RedOpType.PREMUL_SUM):
        with pytest.raises(UsageError) as error:
            QuantizedReduceScatter(8)(torch.empty(2), torch.ones(4), dist.group.WORLD, op)
        messages.append(str(error.value))
    return messages


def test_other_reductions_are_refused_by_name(run_distributed) -> None:
    for messages in run_distributed(refused_operations, 2):
        names = [message.split(".")[0].split()[-1] for message in messages]
        assert names == ["MAX", "PRODUCT", "MIN", "PREMUL_SUM"]


# -- sharded models -------------------------------------------------------------------------------------


def gradients(
    kind: QuantizedType,
    mesh_shape: tuple[int, ...] | None,
    dtype: torch.dtype | None,
    divide_factor: float | None,
) -> float:
    """The largest error of an averaged gradient, as a share of the documented bound."""
    start_runtime(cpu=True)
    plain = plain_model()
    if dtype is not None:
        exact = plain_model()
        exact.load_state_dict(plain.state_dict())
        plain = plain.to(dtype)
    inputs, targets = rows(dist.get_rank())
    F.mse_loss(plain(inputs.to(dtype or torch.float32)).float(), targets).backward()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    model = sharded_model(None, kind, mesh_shape, mp_policy=policy)
    if divide_factor is not None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(divide_factor)
    loss_of(model).backward()
    size = dist.get_world_size()
    worst = 0.0
    for block, plain_block in zip(model, plain, strict=True):
        owned = [p.grad.double() for p in plain_block.parameters()]
        peak = torch.stack([g.abs().max() for g in owned]).max()  # of all blocks: at least that of each
        dist.all_reduce(peak)
        factor = 1 / (divide_factor or size)
        for gradient, parameter in zip(owned, block.parameters(), strict=True):
            dist.all_reduce(gradient)
            rounding = 0 if dtype is None else ROUNDING[dtype]
            allowed = factor * (peak * (1 / (2 * LEVELS[8 if kind is INT8 else 4]) + 2.0**-18 + 4 * rounding))
            worst = max(worst, ((full(parameter.grad) - gradient * factor).abs().max() / allowed).item())
    return worst


@pytest.mark.parametrize(
    ("kind", "mesh_shape", "dtype", "divide_factor"),
    [
        (INT4, (2, 2), None, None),
        (INT8, None, torch.bfloat16, None),
        (INT8, None, torch.float16, None),  # FSDP2 divides before and after a SUM
        (INT4, None, None, 3.0),  # PREMUL_SUM, which gloo does not have
    ],
)
def test_averaged_gradients_are_within_the_bound_of_the_exact_mean(
    run_distributed, kind, mesh_shape, dtype, divide_factor
) -> None:
    for share in run_distributed(gradients, 4, kind, mesh_shape, dtype, divide_factor):
        assert 0 < share <= 1


def weights_of_both_passes(hpz: int) -> list[list[torch.Tensor]]:
    start_runtime(cpu=True)
    model = sharded_model(INT8, None, reshard_after_forward=hpz)
    seen: list[list[torch.Tensor]] = []
    for linear in (block[0] for block in model):
        mine: list[torch.Tensor] = []

        def look(module: nn.Module, *_: object, mine: list[torch.Tensor] = mine) -> None:
            assert not isinstance(module.weight, DTensor)
            mine.append(module.weight.detach().clone())

        linear.register_forward_pre_hook(look)
        linear.register_full_backward_pre_hook(look)
        seen.append(mine)
    loss_of(model).backward()
    return seen


@pytest.mark.parametrize("hpz", [True, 2])
def test_backward_computes_with_the_weights_of_forward_on_every_rank(run_distributed, hpz) -> None:
    results = run_distributed(weights_of_both_passes, 4, hpz)
    for seen in results:
        for mine, first in zip(seen, results[0], strict=True):
            assert len(mine) == 2
            assert torch.equal(mine[0], mine[1]) and torch.equal(mine[0], first[0])


def losses(weights: QuantizedType | None, kind: QuantizedType | None, steps: int) -> list[float]:
    start_runtime(cpu=True)
    model = sharded_model(weights, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history = []
    for step in range(steps):
        loss = loss_of(model, step % 4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        history.append(mean.item() / dist.get_world_size())
    return history


def mean_distance(actual: list[float], expected: list[float]) -> float:
    return sum(abs(a - e) for a, e in zip(actual, expected, strict=True)) / sum(expected)


def test_training_with_quantised_collectives_follows_plain_training(run_distributed) -> None:
    curves = {
        kinds: run_distributed(losses, 2, *kinds, 60)[0]
        for kinds in [(None, None), (INT8, INT8), (None, INT4)]
    }
    plain = curves.pop((None, None))
    for (_, kind), curve in curves.items():
        assert curve[-1] < 0.005 * curve[0]
        assert mean_distance(curve, plain) < (0.05 if kind is INT4 else 0.01)


# -- what is refused ------------------------------------------------------------------------------------


def one_process() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    start_runtime(cpu=True)
    model, plain = sharded_model(INT8, INT4), plain_model()
    loss_of(model).backward()
    loss_of(plain).backward()
    return [full(p.grad) for p in model.parameters()], [p.grad for p in plain.parameters()]


def test_in_a_world_of_one_nothing_is_quantised(run_distributed) -> None:
    for actual, expected in zip(*run_distributed(one_process, 1)[0], strict=True):
        assert torch.equal(actual, expected)


def weights_of_several_types() -> str:
    start_runtime(cpu=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16().requires_grad_(False))
    fully_shard(model)
    quantize_collectives(model, INT8, None)
    with pytest.raises(UsageError) as error:
        model.unshard()
    return str(error.value)


def test_weights_that_travel_as_bytes_are_refused(run_distributed) -> None:
    for message in run_distributed(weights_of_several_types, 2):
        assert "torch.uint8, which cannot be quantised: a group of parameters has several dtypes" in message


def replicated_model() -> tuple[str, set[str]]:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    start_runtime(cpu=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    replicate(model[1])
    with pytest.raises(UsageError) as error:
        quantize_collectives(model, INT8, INT8)
    (group,) = model[0]._get_fsdp_state()._fsdp_param_groups
    return str(error.value), {type(group._all_gather_comm).__name__}


def test_a_module_that_is_not_sharded_is_refused_before_anything_changes(run_distributed) -> None:
    for message, collectives in run_distributed(replicated_model, 2):
        assert "The module '1'" in message
        assert collectives == {"DefaultAllGather"}


def test_a_model_without_shards_and_coarse_weights_are_refused() -> None:
    expect_refusal(UsageError, "fully_shard", quantize_collectives, plain_model(), INT8, None)
    expect_refusal(ConfigError, "int4", quantize_collectives, plain_model(), INT4, None)
    quantize_collectives(plain_model(), None, None)


def test_a_torch_without_custom_collectives_is_named(monkeypatch) -> None:
    monkeypatch.delattr(FSDPModule, "set_custom_all_gather")
    with pytest.raises(ConfigError, match=f"{re.escape(torch.__version__)}"):
        quantize_collectives(plain_model(), INT8, None)
