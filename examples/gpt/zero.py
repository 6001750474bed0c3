"""Trains the GPT under each stage of ZeRO and prints what a rank holds and sends, beside the formulas.

    lockstep launch --nproc 2 examples/gpt/zero.py
    lockstep launch --nproc 2 examples/gpt/zero.py --parallel "zero=3 activation=full" --parallel "zero=2"

The strategy is one word, the argument `parallel` of `Accelerator`; nothing else in the loop knows about it. All
strategies start from the same weights, see the same data, and end at the same loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice, repeat

import corpus
import torch
import torch.nn.functional as F
from memory import peak_bytes
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from lockstep import Accelerator, PartialState
from lockstep.observe import StateBytes
from lockstep.plan import MemoryRow, state_bytes
from lockstep.utils import Parallel, set_seed
from model import GPT, GPTConfig

STRATEGIES = ["ddp", "zero=1", "zero=2", "zero=3", "zero=3 activation=full"]
# Larger than train.py's, so that its state outweighs its activations.
CONFIG = GPTConfig(width=192, layers=6)
MICRO_BATCHES = 2  # of an optimizer step: with one, stages 1 and 2 would be the same
NAMES = [
    "loss",
    "weights",
    "gradients",
    "optimizer",
    "formula",
    "off",
    "peak",
    "formula",
    "sent",
    "formula",
    "off",
]
CAPTION = (
    "MB (10^6 bytes) on rank 0. Peak is all that a step has in memory at once, with activations;\n"
    "its formula is an upper bound of the state in it."
)


@dataclass
class Measured:
    """In bytes. `state` is there from step to step, `peak` within one, `sent` in one."""

    loss: float
    state: StateBytes
    peak: int
    sent: int


def train(parallel: str, steps: int, batch_size: int, text: Tensor) -> tuple[Measured, MemoryRow]:
    """Train a new model; what the last steps needed, and what the formulas say."""
    # Blocks that are named are gathered one by one. Otherwise a model of less than 25 MiB is one group.
    words = f"{parallel} blocks=Block" if "zero" in parallel else parallel
    accelerator = Accelerator(parallel=words, split_batches=True, gradient_accumulation_steps=MICRO_BATCHES)
    set_seed(0)
    model = GPT(CONFIG)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    formula = state_bytes(
        parameters,
        accelerator.num_processes,
        Parallel.parse(parallel),
        "no",
        block=block,
        root=parameters - block * CONFIG.layers,
        micro_batches=MICRO_BATCHES,
    )

    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loader = DataLoader(corpus.Windows(text, CONFIG.context), batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = chain.from_iterable(repeat(loader))  # epoch after epoch

    def step(micro_batches: Iterable[Tensor]) -> Tensor:
        losses = []
        for windows in micro_batches:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
                accelerator.backward(loss)
                optimizer.step()
                losses.append(loss.detach())
        return torch.stack(losses).mean()

    for _ in range(steps):
        loss = step(islice(batches, MICRO_BATCHES))
        optimizer.zero_grad()
    loss = accelerator.reduce(loss, "mean")

    # Steps under instruments that slow them down, on data that lies ready.
    ready = list(islice(batches, MICRO_BATCHES))
    with accelerator.communication() as counter:
        step(ready)
    state = accelerator.state_bytes()
    optimizer.zero_grad()
    peak = peak_bytes(accelerator.device, lambda: (step(ready), optimizer.zero_grad()))
    measured = Measured(loss.item(), state, peak, int(counter.wire_bytes()))
    accelerator.free_memory()
    return measured, formula


def mb(count: float) -> str:
    return f"{count / 1e6:.2f}"


def off(measured: float, formula: float) -> str:
    return f"{100 * (measured / formula - 1):+.2f}%" if formula else "-"


def print_table(rows: dict[str, tuple[Measured, MemoryRow]], title: str) -> None:
    table = Table(title=title, box=box.SIMPLE, caption=CAPTION)
    table.add_column("parallel")
    for name in NAMES:
        table.add_column(name, justify="right", no_wrap=True)
    for parallel, (found, formula) in rows.items():
        at_rest = formula.weights + formula.gradients + formula.optimizer
        table.add_row(
            parallel,
            f"{found.loss:.4f}",
            *map(mb, (found.state.weights, found.state.gradients, found.state.optimizer)),
            *(mb(at_rest), off(found.state.total, at_rest)),
            *(mb(found.peak), mb(formula.peak)),
            *(mb(found.sent), mb(formula.sent.total), off(found.sent, formula.sent.total)),
        )
    console = Console(highlight=False)
    console.width = max(console.width, 140)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parallel", action="append", help="a strategy; repeat it for several (default: all)"
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each strategy")
    parser.add_argument("--batch-size", type=int, default=4, help="windows per forward, over all processes")
    args = parser.parse_args()

    text, _ = corpus.load()
    rows = {
        parallel: train(parallel, args.steps, args.batch_size, text)
        for parallel in args.parallel or STRATEGIES
    }
    processes = PartialState()
    if processes.is_main_process:
        title = f"{args.steps} steps of {MICRO_BATCHES} micro-batches, {processes.num_processes} process(es), AdamW"
        print_table(rows, title)


if __name__ == "__main__":
    main()
