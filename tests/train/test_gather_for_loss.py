"""A loss over the global batch has on several ranks the gradients that plain torch has on one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator
from lockstep.errors import CollectiveMismatchError, LockstepError, UsageError
from tests.marks import again

Distributed = Callable[..., list[Any]]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(x), self.scale * 1


def contrast(embeddings: Tensor, positions: Tensor, scale: Tensor) -> Tensor:
    """Depends on every pair of rows, and on their order."""
    products = embeddings @ embeddings.T * scale
    return nn.functional.cross_entropy(products + positions[:, None] * 0.1, torch.arange(len(embeddings)))


def rows() -> TensorDataset:
    torch.manual_seed(3)
    return TensorDataset(torch.randn(22, 6), torch.arange(22.0))


def plain(batch_size: int) -> list[Tensor]:
    """Weights after each of two epochs of plain torch with global batches."""
    torch.manual_seed(0)
    model, loader = Encoder(), DataLoader(rows(), batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for _ in range(2):
        for x, positions in loader:
            embeddings, scale = model(x)
            contrast(embeddings, positions, scale).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    return found


def train(parallel: str | None, batch_size: int) -> list[Tensor]:
    accelerator = Accelerator(cpu=True, parallel=parallel, split_batches=True)
    torch.manual_seed(0)
    model, loader = Encoder(), DataLoader(rows(), batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for _ in range(2):
        for x, positions in loader:
            embeddings, scale = model(x)
            embeddings, positions = accelerator.gather_for_loss((embeddings, positions))
            assert embeddings.requires_grad and not positions.requires_grad
            accelerator.backward(contrast(embeddings, positions, scale))
            optimizer.step()
            optimizer.zero_grad()
        weights = accelerator.get_state_dict(model)
        found.append(torch.cat([weights[name].flatten() for name, _ in Encoder().named_parameters()]))
    return found


@pytest.mark.parametrize(
    ("parallel", "ranks", "batch_size"),
    [
        ("ddp", 1, 8),
        ("ddp", 2, 8),
        ("ddp", 2, 20),  # the last batch has 2 rows
        ("zero=3", 2, 8),
        again("ddp", 4, 20),  # rank 0 has 2 rows of the last batch, the others repeat
        again("zero=2", 4, 8),
        again("zero=3", 4, 20),
        again("zero=3 replicate=2", 4, 8),
        again("tp=2", 4, 8),
    ],
)
def test_a_loss_over_the_global_batch_trains_as_on_one_process(
    run_distributed: Distributed, parallel: str, ranks: int, batch_size: int
) -> None:
    for found in run_distributed(train, ranks, parallel, batch_size):
        for mine, theirs in zip(found, plain(batch_size), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6)


def ragged(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """This rank's gradient, and that of autograd on the whole, of rows of unequal number; rank 1 has none."""
    accelerator = Accelerator(cpu=True)
    counts = [3, 0, 1, 2][: accelerator.num_processes]
    torch.manual_seed(1)
    whole = torch.randn(sum(counts), 2, 3, dtype=dtype, requires_grad=True)
    start = sum(counts[: accelerator.process_index])
    own = whole.detach()[start : start + counts[accelerator.process_index]].clone().requires_grad_()
    gathered = accelerator.gather_for_loss({"rows": own})["rows"]
    factors = torch.arange(1.0, whole.numel() + 1, dtype=dtype).view_as(whole)
    # Each rank has a loss of its own: a rank's gradient is that of their sum.
    ((accelerator.process_index + 1) * factors * gathered**2).sum().backward()
    ranks = sum(range(1, accelerator.num_processes + 1))
    (ranks * factors * whole**2).sum().backward()
    assert own.grad is not None and whole.grad is not None
    return own.grad, whole.grad[start : start + len(own)]


@pytest.mark.parametrize(
    ("ranks", "dtype"), [(2, torch.float32), again(4, torch.float64), again(4, torch.bfloat16)]
)
def test_ranks_may_have_unequal_rows_or_none(
    run_distributed: Distributed, ranks: int, dtype: torch.dtype
) -> None:
    for mine, expected in run_distributed(ragged, ranks, dtype):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, expected)


def refused() -> list[str]:
    accelerator = Accelerator(cpu=True)
    rank, found = accelerator.process_index, []
    with pytest.raises(CollectiveMismatchError) as error:
        accelerator.gather_for_loss(torch.ones(2, 2, requires_grad=rank == 0))
    found.append(str(error.value))
    loader = accelerator.prepare(DataLoader(torch.ones(5, 2), 3))
    for batch in loader:
        assert len(batch) == 3
        last = accelerator.gradient_state.end_of_dataloader
    assert last
    for batch in loader:
        if accelerator.gradient_state.end_of_dataloader:
            with pytest.raises((UsageError, LockstepError)) as failure:
                accelerator.gather_for_loss(torch.ones(2 * len(batch), 2) if rank else batch)
            found.append(str(failure.value))
    return found


def test_what_differs_between_ranks_or_cannot_be_cut_is_refused_on_all(run_distributed: Distributed) -> None:
    for mismatch, padded in run_distributed(refused, 2):
        assert re.search(r"float32 with gradient.*\n.*float32 on cpu", mismatch), mismatch
        assert "cannot tell which rows of a tensor [6, 2] only pad the last batch" in padded
        assert "drop_last=True" in padded
