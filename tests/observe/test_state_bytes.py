"""Counted bytes of training state against sums written by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep import Accelerator
from lockstep.observe import StateBytes, count_state
from lockstep.parallel import ParallelModel

WIDTH = 8
BLOCKS = 3


class Tied(nn.Module):
    """Blocks, an embedding that is also the output, a frozen layer and a scalar. All sizes divide by 2."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS))
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.out = nn.Linear(WIDTH, 16, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.frozen(self.embedding(tokens))
        for block in self.blocks:
            rows = block(rows)
        return self.out(rows) * self.scale


SHARED_OUT = 16 * WIDTH + BLOCKS * (WIDTH * WIDTH + WIDTH)  # trainable, without the scalar
FROZEN = WIDTH * WIDTH
TENSORS = 1 + 2 * BLOCKS + 1  # trainable; AdamW counts the steps of each in four bytes


def tokens() -> torch.Tensor:
    return torch.randint(0, 16, (2, 5))


def test_a_tied_tensor_counts_once_and_a_frozen_one_has_weights_alone() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    assert count_state([ParallelModel(model)], [optimizer]) == StateBytes(4 * (SHARED_OUT + FROZEN + 1), 0, 0)
    model(tokens()).sum().backward()
    optimizer.step()
    trained = SHARED_OUT + 1
    assert count_state([ParallelModel(model)], [optimizer]) == StateBytes(
        weights=4 * (trained + FROZEN), gradients=4 * trained, optimizer=8 * trained + 4 * TENSORS
    )


def test_state_in_lists_counts() -> None:
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x = torch.randn(8, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) ** 2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    (state,) = optimizer.state.values()
    lists = sum(t.nbytes for name in ("old_dirs", "old_stps", "ro") for t in state[name])
    lists += sum(t.nbytes for t in state["al"] if t is not None)
    single = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    assert lists > 0
    assert count_state([ParallelModel(model)], [optimizer]).optimizer == lists + single


def on_ranks(parallel: str) -> list[Any]:
    """What is counted inside a window of two, after it, and after ``zero_grad``; and shards that torch reports."""
    accelerator = Accelerator(cpu=True, parallel=parallel, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = Tied()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    counted = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(tokens()).sum())
            optimizer.step()
        counted.append(accelerator.state_bytes())
    shards = sum(
        parameter.to_local().nbytes for parameter in model.parameters() if isinstance(parameter, DTensor)
    )
    optimizer.zero_grad()
    return [*counted, accelerator.state_bytes(), shards]


def test_of_a_sharded_model_each_rank_counts_its_part(run_distributed: Any) -> None:
    trained = SHARED_OUT // 2 + 1  # scalars stay whole
    for found in run_distributed(on_ranks, 2, "zero=3"):
        inside, after, cleared, shards = found
        assert shards == 4 * (SHARED_OUT + FROZEN) // 2
        assert after == StateBytes(shards + 4, 4 * trained, 8 * trained + 4 * TENSORS)
        assert inside == StateBytes(after.weights, after.gradients, 0)
        assert cleared == StateBytes(after.weights, 0, after.optimizer)
    for inside, after, _, _ in run_distributed(on_ranks, 2, "zero=1"):  # its gathered weights are not counted
        assert inside == StateBytes(after.weights, 4 * (SHARED_OUT + 1), 0)
        assert after.gradients == 4 * trained
        assert after.total == after.weights + after.gradients + after.optimizer


def test_sparse_gradients_have_the_size_of_their_entries() -> None:
    accelerator = Accelerator()
    model: Any = torch.nn.Embedding(100, 4, sparse=True)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.tensor([1, 5, 1])).sum())
    assert accelerator.state_bytes().gradients == 2 * (8 + 4 * 4)  # two rows, each with its number
