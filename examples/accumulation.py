"""Gradient accumulation over batches of unequal length, and the silent bug of averaging their means.

    python examples/accumulation.py
    lockstep launch --nproc 2 examples/accumulation.py

A mean over the tokens of each micro-batch, then a mean of these means, weighs a token of a short batch more
than one of a long batch. Nothing fails; the gradient is just not that of the big batch.
`accelerator.backward(loss, weight=...)` is exact: the gradient is that of sum(weight * loss) / sum(weight)
over the whole accumulation window and all processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lockstep import Accelerator

PAD = 256  # after the 256 bytes


def lines(count: int) -> list[Tensor]:
    """Lines of this file as bytes, short ones first: batches of similar length, as is usual for text."""
    text = [line.strip() for line in Path(__file__).read_text().splitlines() if len(line.strip()) > 1]
    return [torch.tensor(list(line.encode())) for line in sorted(text[:count], key=len)]


def collate(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=PAD)


def language_model() -> nn.Module:
    """Predicts each byte from the one before it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(257, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 256))


def token_losses(model: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each token and its weight: 1, or 0 where there is only padding. Both [rows, length - 1]."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    weight = (targets != PAD).float()
    losses = F.cross_entropy(model(inputs).transpose(1, 2), targets.where(weight > 0, 0), reduction="none")
    return losses, weight


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def accumulated_gradient(
    accelerator: Accelerator, loader: DataLoader, backward: Callable[[Tensor, Tensor], None]
) -> Tensor:
    """The gradient after one accumulation window over all of `loader`."""
    model = accelerator.prepare(language_model())
    for rows in loader:
        with accelerator.accumulate(model):
            backward(*token_losses(model, rows))
    return flat_gradient(model)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8, help="lines per micro-batch, over all processes")
    args = parser.parse_args()

    accelerator = Accelerator(split_batches=True, gradient_accumulation_steps=args.micro_batches)
    data = lines(args.micro_batches * args.batch_size)

    model = language_model().to(accelerator.device)
    losses, weight = token_losses(model, collate(data).to(accelerator.device))
    ((losses * weight).sum() / weight.sum()).backward()
    big_batch = flat_gradient(model)

    def mean_of_means(losses: Tensor, weight: Tensor) -> None:
        accelerator.backward((losses * weight).sum() / weight.sum())

    def weighted_by_count(losses: Tensor, weight: Tensor) -> None:
        accelerator.backward((losses * weight).sum() / weight.sum(), weight=weight.sum())

    def weighted_by_token(losses: Tensor, weight: Tensor) -> None:
        accelerator.backward(losses, weight=weight)

    loader = accelerator.prepare(DataLoader(data, args.batch_size, collate_fn=collate))
    tokens = [len(row) - 1 for row in data]
    accelerator.print(
        f"{len(data)} lines of {min(tokens)} to {max(tokens)} tokens, in {args.micro_batches} micro-batches "
        f"on {accelerator.num_processes} process(es)"
    )
    accelerator.print("distance of the gradient from that of the one big batch, relative to its norm:")
    for backward in (mean_of_means, weighted_by_count, weighted_by_token):
        gradient = accumulated_gradient(accelerator, loader, backward)
        difference = (gradient - big_batch).norm() / big_batch.norm()
        accelerator.print(f"  {backward.__name__:18} {difference:.1e}")


if __name__ == "__main__":
    main()
