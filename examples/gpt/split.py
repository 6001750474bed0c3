"""Trains the GPT with one model spread over several processes, in three ways at once.

    lockstep launch --nproc 8 examples/gpt/split.py --parallel "pp=2 tp=2"
    lockstep launch --nproc 4 examples/gpt/split.py --parallel "zero=3 cp=2"
    python examples/gpt/split.py

With `pp=2 tp=2` on 8 processes, two copies of the model learn from different batches (data parallel), each copy has
two stages (pipeline), and each stage's layers are divided between two processes (tensor). All commands print the same
losses: the strategy is one word, the argument `parallel` of `Accelerator`, and nothing else in the loop knows about it.
"""

from __future__ import annotations

import argparse
from itertools import islice

import corpus
import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from lockstep import Accelerator
from lockstep.utils import gather_object, set_seed
from model import GPT, GPTConfig

CONFIG = GPTConfig(width=128, layers=4, heads=4)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """In nats per byte: logits [rows, context, vocabulary], targets [rows, context]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def print_what_ranks_hold(accelerator: Accelerator) -> None:
    held = accelerator.state_bytes()
    everyone = gather_object([(held.weights, held.gradients, held.optimizer)])
    if not accelerator.is_main_process:
        return
    table = Table(title="bytes that each process holds", box=box.SIMPLE)
    for name in ("rank", "weights", "gradients", "optimizer state"):
        table.add_column(name, justify="right")
    for rank, sizes in enumerate(everyone):
        table.add_row(str(rank), *(f"{size:,}" for size in sizes))
    Console(highlight=False).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parallel", help="how the model is spread, such as 'pp=2 tp=2'")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=16, help="windows in a step, over all processes")
    args = parser.parse_args()

    accelerator = Accelerator(parallel=args.parallel, split_batches=True)
    set_seed(0)
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    text, _ = corpus.load()
    loader = DataLoader(corpus.Windows(text, CONFIG.context), args.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for step, windows in enumerate(islice(loader, args.steps)):
        # As `loss = mean_loss(model(inputs), targets)` and `accelerator.backward(loss)`, but a pipeline knows the loss
        # before it begins, so that backward of the first micro-batches runs beside forward of the last.
        loss = accelerator.train_step(model, mean_loss, windows[:, :-1], windows[:, 1:])
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 4:
            accelerator.print(f"step {step + 1:3d}  loss {accelerator.reduce(loss, 'mean').item():.4f}")
        if step + 1 < args.steps:
            optimizer.zero_grad()
    print_what_ranks_hold(accelerator)
    accelerator.end_training()


if __name__ == "__main__":
    main()
