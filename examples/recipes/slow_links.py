"""Trains over slow links: ranks that meet seldom send a small part of the bytes of ranks that meet at every step.

    lockstep launch --nproc 2 examples/recipes/slow_links.py --mode diloco
    lockstep launch --nproc 2 examples/recipes/slow_links.py --mode stale --slow-ms 100

sync: gradients are averaged at each step, as by DDP. diloco: ranks train by themselves for `--every` steps, then an
outer optimizer steps on the mean of where these led. local: parameters are averaged then. stale: gradients are averaged
at each step, but applied when they come, up to `--staleness` steps late. `--slow-ms`: ranks nap, never all at once.

For a real model, on four machines of a rank or more each:
    lockstep launch --hosts a,b,c,d --nproc 1 slow_links.py --mode diloco --every 100 --steps 20000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from itertools import chain, repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from data import corpus
from lockstep import Accelerator, BoundedStaleness, DiLoCo, LocalSGD
from lockstep.parallel.asynchronous import StalenessReport
from lockstep.utils import set_seed
from model import GPT, GPTConfig

MODES = ("sync", "local", "diloco", "stale")
NAP_EVERY = 4


def option(default: float, text: str) -> Any:
    return field(default=default, metadata={"help": f"{text} (default: {default})"})


@dataclass(frozen=True)
class Options:
    steps: int = option(240, "steps of the optimizer")
    every: int = option(20, "steps between means (local) or outer steps (diloco), and between validations")
    staleness: int = option(2, "steps that a gradient may be late (stale)")
    batch_size: int = option(16, "windows in a step, over all processes")
    learning_rate: float = option(2e-3, "of AdamW")
    slow_ms: float = option(0.0, f"nap of a rank in one of {NAP_EVERY} steps")
    config: GPTConfig = field(default_factory=lambda: GPTConfig(width=96, layers=2))


@dataclass
class Result:
    """`losses`: after so many windows, this validation loss in nats per byte. `bytes_sent`: by this rank."""

    bytes_of_model: int
    losses: list[tuple[int, float]] = field(default_factory=list)
    bytes_sent: float = 0.0
    report: StalenessReport | None = None


def mean_loss(model: nn.Module, windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def validate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """The mean loss over the validation windows, with parameters that are the same on all ranks."""
    losses = [mean_loss(accelerator.unwrap_model(model), windows) for windows in loader]
    return accelerator.reduce(torch.stack(losses).mean(), "mean").item()


def train(mode: str, options: Options, training: Tensor, validation: Tensor) -> Result:
    """Train a new model; all modes start from the same weights and see the same data."""
    accelerator = Accelerator(split_batches=True)
    set_seed(0)
    model, context = GPT(options.config), options.config.context
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, betas=(0.9, 0.95))
    windows, checked = corpus.Windows(training, context), corpus.Windows(validation, context, limit=128)
    loader = DataLoader(windows, options.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader, check = accelerator.prepare(model, optimizer, loader, DataLoader(checked, 64))

    result = Result(sum(parameter.nbytes for parameter in model.parameters()))
    batches = chain.from_iterable(repeat(loader))  # epoch after epoch
    blocks: dict[str, Callable[[], AbstractContextManager[Any]]] = {  # the only difference between the modes
        "sync": nullcontext,
        "local": lambda: LocalSGD(accelerator, model, options.every),
        "diloco": lambda: DiLoCo(accelerator, model, options.every),
        "stale": lambda: BoundedStaleness(accelerator, model, optimizer, options.staleness),
    }
    with blocks[mode]() as block:
        for step in range(0, options.steps, options.every):
            with accelerator.communication() as counter:
                for i in range(options.every):
                    if options.slow_ms and (step + i + 2 * accelerator.process_index) % NAP_EVERY == 0:
                        time.sleep(options.slow_ms / 1000)
                    accelerator.backward(mean_loss(model, next(batches)))
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    if mode == "stale":
                        block.step()  # in place of the optimizer's
                    else:
                        optimizer.step()
                        if mode != "sync":
                            block.step()
                    optimizer.zero_grad()
                if mode == "stale":
                    block.synchronize()
            result.bytes_sent += counter.wire_bytes()
            loss = validate(accelerator, model, check)
            result.losses.append(((step + options.every) * options.batch_size, loss))
    if mode == "stale":
        # The counter does not see what the server's thread answers.
        result.report, result.bytes_sent = block.report, block.report.bytes_sent
    accelerator.free_memory()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=MODES, default="diloco", help="how ranks meet (default: diloco)")
    for one in fields(Options):
        if "help" in one.metadata:
            name = f"--{one.name.replace('_', '-')}"
            parser.add_argument(name, type=type(one.default), default=one.default, help=one.metadata["help"])
    args = vars(parser.parse_args())
    mode = args.pop("mode")
    if args["steps"] % args["every"]:
        parser.error(f"--steps {args['steps']} is no multiple of --every {args['every']}.")

    accelerator = Accelerator()
    result = train(mode, Options(**args), *corpus.load())
    for seen, loss in result.losses:
        accelerator.print(f"{seen:>6} windows: validation loss {loss:.5f} nats per byte")
    # A ring all-reduce of the gradients in each step.
    of_ddp = args["steps"] * 2 * (1 - 1 / accelerator.num_processes) * result.bytes_of_model
    accelerator.print(
        f"{mode}: {result.bytes_sent / 1e6:.3f} MB sent by each process; "
        f"the gradients of all steps are {of_ddp / 1e6:.3f} MB"
    )
    if result.report is not None:
        accelerator.print(result.report)


if __name__ == "__main__":
    main()
