"""Functional all-gathers and sparse sums under gloo: plain torch's numbers, without its race for a name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from lockstep import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from lockstep.runtime import start_runtime

SHAPES = ((1,), (3, 2), (2, 3, 4), (4, 0))
KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def operators() -> Any:
    return torch.ops._c10d_functional


def gathered_by_torch(mine: Tensor) -> Tensor:
    """As rows of bytes, which ask nothing of gloo."""
    own = torch.view_as_real(mine) if mine.is_complex() else mine
    rows = own.contiguous().flatten().view(torch.uint8)
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    if rows.numel():
        dist.all_gather(parts, rows)
    return torch.cat([part.view(mine.dtype).view(mine.shape) for part in parts])


def gather_all() -> list[str]:
    """The cells in which functional all-gathers differ from ``gathered_by_torch``."""
    start_runtime(cpu=True)
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    numbers = torch.Generator().manual_seed(dist.get_rank())
    wrong = []

    def compare(name: str, found: Tensor, expected: Tensor) -> None:
        if found.dtype != expected.dtype or not torch.equal(found, expected):
            wrong.append(f"{name}: {found} instead of {expected}")

    gather = operators().all_gather_into_tensor
    for shape in SHAPES:
        mine = [(torch.randn(shape, generator=numbers) * 3).to(kind) for kind in KINDS]
        for tensor in mine:
            found = operators().wait_tensor(gather(tensor, ranks, group))
            compare(f"{tensor.dtype} {shape}", found, gathered_by_torch(tensor))
        same = [mine[0], mine[0] * 2]
        each = operators().all_gather_into_tensor_coalesced(same, ranks, group)
        for found, tensor in zip(each, same, strict=True):
            compare(f"each {shape}", operators().wait_tensor(found), gathered_by_torch(tensor))

    whole = torch.arange(14.0).view(7, 2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    compare("DTensor", distribute_tensor(whole, mesh, [Shard(0)]).full_tensor(), whole)
    own = torch.randn(2, 3, generator=numbers)

    def thrice(x: Tensor) -> Tensor:
        return functional.all_gather_tensor(x, 0, dist.group.WORLD) * 3

    compiled = torch.compile(thrice, backend="aot_eager", fullgraph=True)
    compare("compiled", compiled(own), gathered_by_torch(own) * 3)
    leaf = own.clone().requires_grad_()
    factor = torch.arange(2.0 * ranks)[:, None]
    (functional.all_gather_tensor_autograd(leaf, 0, dist.group.WORLD) * factor).sum().backward()
    start = 2 * dist.get_rank()  # each rank's own loss, summed by the reduce-scatter
    compare("gradient", leaf.grad, (ranks * factor[start : start + 2]).expand(2, 3))
    return wrong


def test_functional_all_gathers_give_the_numbers_of_the_plain_one(run_distributed) -> None:
    assert run_distributed(gather_all, 2) == [[], []]


def join_alone() -> str:
    """A gloo group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    start_runtime(cpu=True)
    return dist.group.WORLD.group_name


def gather_numbers() -> list[Tensor]:
    group, number = join_alone(), torch.tensor(3.0)
    one = operators().all_gather_into_tensor(number, 1, group)
    each = operators().all_gather_into_tensor_coalesced([number, number], 1, group)
    return [operators().wait_tensor(tensor) for tensor in (one, *each)]


def test_gloo_is_not_asked_for_the_gather_with_the_long_name(run_distributed) -> None:
    """It alone refuses a tensor without dimensions: "ProcessGroupGloo::allgather_coalesced: invalid size"."""
    (results,) = run_distributed(gather_numbers, 1)
    assert [tensor.tolist() for tensor in results] == [[3.0]] * 3


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 4, sparse=sparse)
        self.head = nn.Linear(4, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embedding(words).mean(1))


def steps_of(model: Any, rows: Tensor, backward: Any) -> list[Tensor]:
    trained = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        trained.zero_grad()
        backward(model(rows).square().mean())
        trained.step()
    return [parameter.detach() for parameter in model.parameters()]


def words() -> Tensor:
    return torch.randint(11, (8, 5), generator=torch.Generator().manual_seed(1))


def train_words(sparse: bool, hook: str) -> tuple[list[Tensor], int, bool]:
    """(parameters, threads that average gradients, whether in the main group)"""
    options = DistributedDataParallelKwargs(comm_hook=hook)
    backend = InitProcessGroupKwargs(backend="gloo")
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options, backend])
    model = accelerator.prepare(Words(sparse))
    group = model.process_group
    threads = group._get_backend(torch.device("cpu")).options._threads
    mine = words().chunk(accelerator.num_processes)[accelerator.process_index]
    trained = steps_of(model, mine, accelerator.backward)
    return trained, threads, group is dist.group.WORLD


@pytest.mark.parametrize("hook", ["no", "bf16"])
def test_sparse_gradients_are_averaged_by_one_thread(run_distributed, hook: str) -> None:
    expected = steps_of(Words(sparse=True), words(), torch.Tensor.backward)
    tolerance = {"no": 1e-6, "bf16": 5e-3}[hook]
    for trained, threads, main in run_distributed(train_words, 2, True, hook):
        assert (threads, main) == (1, False)
        for found, wanted in zip(trained, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    for _, threads, main in run_distributed(train_words, 2, False, hook):
        assert (threads, main) == (2, True)
