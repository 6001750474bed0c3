"""Predicted bytes against torch's own engines, counted: DDP, and ``fully_shard`` set up for each stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lockstep.comm import CommCounter
from lockstep.plan import ModelSize, dtypes, sent_bytes, state_bytes
from lockstep.runtime import start_runtime
from lockstep.utils import Parallel
from parallel.blocks_and_root import BlocksAndRoot

WIDTH, BLOCKS = 16, 3
BLOCK = 2 * WIDTH * WIDTH
ROOT = WIDTH * WIDTH
SIZE = ModelSize(BLOCKS * BLOCK + ROOT, BLOCKS * BLOCK + ROOT, BLOCK, ROOT)
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def sharded(plan: Parallel, precision: str) -> Any:
    shape = (plan.replicate, dist.get_world_size() // plan.replicate)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    if plan.replicate == 1:
        mesh = mesh["shard"]
    compute = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    reduce = TORCH[plan.reduce] if plan.reduce else compute  # which torch before 2.15 does without being told
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    model = BlocksAndRoot(WIDTH, BLOCKS)
    for block in model.blocks:
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=(plan.hpz or True) if plan.zero == 3 else False,
        )
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def step(model: Any, plan: Parallel, micro_batches: int) -> None:
    for i in range(micro_batches):
        last = i == micro_batches - 1
        if plan.shards:
            model.set_requires_gradient_sync(last or plan.zero > 1)
            model.set_requires_all_reduce(last)
            model.set_reshard_after_backward(last or plan.zero == 3)
            model(torch.randn(2, WIDTH)).sum().backward()
        elif last:
            model(torch.randn(2, WIDTH)).sum().backward()
        else:
            with model.no_sync():
                model(torch.randn(2, WIDTH)).sum().backward()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def count(text: str, precision: str, micro_batches: int) -> dict[str, Any]:
    """Bytes and types on this rank, by torch alone, in the second step."""
    start_runtime(cpu=True)
    torch.manual_seed(0)
    plan = Parallel.parse(text)
    model: Any = (
        sharded(plan, precision)
        if plan.shards
        else nn.parallel.DistributedDataParallel(BlocksAndRoot(WIDTH, BLOCKS))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, plan, micro_batches)
    optimizer.step()
    optimizer.zero_grad()
    with CommCounter() as counter:
        step(model, plan, micro_batches)
    optimizer.step()
    weights = [local(parameter) for parameter in model.parameters()]
    gradients = [local(parameter.grad) for parameter in model.parameters()]
    state = [local(t) for one in optimizer.state.values() for t in one.values() if t.ndim]
    return {
        "weights": sum(t.nbytes for t in weights),
        "gradients": sum(t.nbytes for t in gradients),
        "optimizer": sum(t.nbytes for t in state),
        "stored": {t.dtype for t in [*weights, *gradients, *state]},
        "reduced": {r.dtype for r in counter.records if r.operation in ("reduce_scatter", "all_reduce")},
        "gathered": {r.dtype for r in counter.records if r.operation == "all_gather"},
        "sent": {name: counter.wire_bytes(name) for name in ("all_gather", "reduce_scatter", "all_reduce")},
    }


CASES = [
    (2, "ddp", "no"),
    (2, "zero=2", "no"),
    (2, "zero=3", "no"),
    (2, "zero=1 reduce=fp32", "bf16"),
    (2, "zero=2", "bf16"),
    (2, "zero=3 reduce=fp32", "fp16"),
    (4, "zero=1", "bf16"),
    (4, "zero=1 replicate=2", "no"),
    (4, "zero=2 replicate=2", "no"),
    (4, "zero=3 replicate=2", "bf16"),
    (4, "zero=3 hpz=2", "bf16"),
]


@pytest.mark.parametrize(
    ("ranks", "text", "precision", "micro_batches"),
    [*((*case, 3) for case in CASES), (2, "ddp", "no", 1), (2, "zero=3", "no", 1)],
)
def test_torch_holds_and_sends_what_was_predicted(
    run_distributed: Any, ranks: int, text: str, precision: str, micro_batches: int
) -> None:
    plan = Parallel.parse(text)
    row = state_bytes(SIZE.parameters, ranks, plan, precision)
    sent = sent_bytes(SIZE, ranks, plan, precision, micro_batches)
    types = dtypes(plan, precision, ranks)
    for found in run_distributed(count, ranks, text, precision, micro_batches):
        assert (found["weights"], found["gradients"], found["optimizer"]) == (
            row.weights,
            row.gradients,
            row.optimizer,
        )
        assert found["stored"] == {torch.float32}
        assert found["reduced"] == {TORCH[types["gradients on the wire"]]}
        assert found["gathered"] == ({TORCH[types["weights on the wire"]]} if plan.shards else set())
        assert found["sent"] == {name: getattr(sent, name) for name in found["sent"]}
