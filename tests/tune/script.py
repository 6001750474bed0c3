"""A script that trains a small model, with what ``lockstep tune`` has to cope with: the words on its command line."""

from __future__ import annotations

import argparse
import os
import signal
import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator

MIB = 2**20


class Fails(nn.Module):
    """Passes its input on, and fails in one of the ways of a full memory where it has more than ``above`` rows."""

    def __init__(self, how: str, above: int, rank: int) -> None:
        super().__init__()
        self.how, self.above, self.rank = how, above, rank

    def forward(self, rows: Tensor) -> Tensor:
        if len(rows) <= self.above or int(os.environ.get("RANK", "0")) != self.rank:
            return rows
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "hang":
            time.sleep(600)
        if self.how == "raise":
            raise ValueError(f"{len(rows)} rows are too many")
        raise torch.OutOfMemoryError(f"out of memory: {len(rows)} rows")


class Takes(nn.Module):
    """Passes its input on, and takes so many MiB for each row until backward."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        self.mib = mib

    def forward(self, rows: Tensor) -> Tensor:
        taken = torch.ones(len(rows), self.mib * MIB // 4)
        return rows + (taken * rows.mean()).mean() * 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--fails", default="")
    parser.add_argument("--above", type=int, default=0)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--mib", type=int, default=0)
    parser.add_argument("--dump", default="", help="a folder for the weights after each step")
    parser.add_argument("--is", dest="what", default="")
    args = parser.parse_args()

    torch.manual_seed(1)
    data = TensorDataset(torch.randn(args.samples, 8), torch.randn(args.samples, 1))
    layers: list[nn.Module] = [
        nn.Linear(8, 16),
        nn.BatchNorm1d(16) if args.what == "norm" else nn.Tanh(),
        nn.Linear(16, 1),
    ]
    if args.fails:
        layers.insert(0, Fails(args.fails, args.above, args.rank))
    if args.mib:
        layers.insert(0, Takes(args.mib))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
    sets_later = args.what == "sets_later"
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=1 if sets_later or args.what == "counts" else args.accumulate,
        split_batches=args.what == "split",
    )
    if sets_later:
        accelerator.gradient_accumulation_steps = args.accumulate
    model, optimizer = accelerator.prepare(model, optimizer)
    if args.what != "no_loader":
        loader = accelerator.prepare(loader)
    if args.what == "no_step":
        return
    weighs = args.what == "weighs"
    loss_of = nn.MSELoss(reduction="sum" if args.what == "sum" else "none" if weighs else "mean")

    def train(inputs: Tensor, targets: Tensor, number: int) -> None:
        loss = loss_of(model(inputs), targets)
        if weighs:
            accelerator.backward(loss.mean(1), weight=accelerator.sample_weights())
        elif args.what == "counts":
            accelerator.backward(loss / args.accumulate)
            if number % args.accumulate:
                return
        else:
            accelerator.backward(loss)
        optimizer.step()
        if args.dump and accelerator.sync_gradients and accelerator.is_main_process:
            steps.append(len(steps) + 1)
            torch.save(
                [value.detach() for value in model.parameters()],
                f"{args.dump}/{loader.batch_size}-{len(steps)}.pt",
            )
        optimizer.zero_grad()

    steps: list[int] = []
    for _ in range(args.epochs):
        for number, (inputs, targets) in enumerate(loader, 1):
            if args.what in ("counts", "plain"):
                train(inputs, targets, number)
                continue
            with accelerator.accumulate(model):
                train(inputs, targets, number)


if __name__ == "__main__":
    main()
