"""Trains the byte-level GPT with ranks that don't wait for each other at every step.

    lockstep launch --nproc 2 examples/asynchronous.py --mode sync
    lockstep launch --nproc 2 examples/asynchronous.py --mode local
    lockstep launch --nproc 2 examples/asynchronous.py --mode diloco
    lockstep launch --nproc 2 examples/asynchronous.py --mode stale --slow-ms 100

sync: gradients are averaged at each step. local: parameters are, every `--every` steps. diloco: an outer optimizer
steps on where these steps led. stale: gradients are averaged at each step, but applied when they come, up to
`--staleness` steps late. `--slow-ms` makes each rank nap now and then, never both at once.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import Accelerator, BoundedStaleness, DiLoCo, LocalSGD
from lockstep.parallel.asynchronous.stale import StalenessReport
from lockstep.utils import set_seed

sys.path.insert(0, str(Path(__file__).parent / "gpt"))
import corpus

from model import GPT, GPTConfig

MODES = ("sync", "local", "diloco", "stale")
NAP_EVERY = 4  # steps, with --slow-ms


@dataclass(frozen=True)
class Options:
    steps: int = 240  # of the optimizer
    every: int = 20  # steps between means (local) or outer steps (diloco), and between validations
    staleness: int = 2
    batch_size: int = 16  # windows in a step, over all processes
    learning_rate: float = 2e-3
    slow_ms: float = 0.0
    config: GPTConfig = field(default_factory=lambda: GPTConfig(width=96, layers=2))


@dataclass
class Result:
    """`losses`: after so many windows, this validation loss in nats per byte. `bytes_sent`: by rank 0, in training."""

    losses: list[tuple[int, float]] = field(default_factory=list)
    bytes_sent: float = 0.0
    report: StalenessReport | None = None


def mean_loss(model: nn.Module, windows: Tensor) -> Tensor:
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def validate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """The mean loss over the validation windows, with parameters that are the same on all ranks."""
    plain = accelerator.unwrap_model(model).eval()
    losses = [mean_loss(plain, windows) for windows in loader]
    plain.train()
    return accelerator.reduce(torch.stack(losses).mean(), "mean").item()


def asynchronous(
    mode: str, accelerator: Accelerator, model: nn.Module, optimizer: Any, options: Options
) -> AbstractContextManager[Any]:
    """The block around the loop: the only difference between the modes."""
    if mode == "local":
        return LocalSGD(accelerator, model, options.every)
    if mode == "diloco":
        return DiLoCo(accelerator, model, options.every)
    if mode == "stale":
        return BoundedStaleness(accelerator, model, optimizer, options.staleness)
    return nullcontext()


def train(mode: str, options: Options, training: Tensor, validation: Tensor) -> Result:
    """Train a new model; all modes start from the same weights and see the same data."""
    accelerator = Accelerator(split_batches=True)
    set_seed(0)
    config = options.config
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, betas=(0.9, 0.95))
    loader = DataLoader(
        corpus.Windows(training, config.context), options.batch_size, shuffle=True, drop_last=True
    )
    check = DataLoader(corpus.Windows(validation, config.context, limit=128), 64)
    model, optimizer, loader, check = accelerator.prepare(model, optimizer, loader, check)

    result = Result()
    batches = chain.from_iterable(repeat(loader))  # epoch after epoch
    with asynchronous(mode, accelerator, model, optimizer, options) as block:
        for step in range(0, options.steps, options.every):
            with accelerator.communication() as ledger:
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
            result.bytes_sent += ledger.wire_bytes()
            windows = (step + options.every) * options.batch_size
            result.losses.append((windows, validate(accelerator, model, check)))
    if mode == "stale":
        result.report = block.report
        result.bytes_sent = (
            block.report.bytes_sent
        )  # the ledger does not see what the server's thread answers
    accelerator.free_memory()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Options()
    parser.add_argument("--mode", choices=MODES, default="sync")
    parser.add_argument("--steps", type=int, default=default.steps, help="optimizer steps")
    parser.add_argument("--every", type=int, default=default.every, help="steps between means or outer steps")
    parser.add_argument("--staleness", type=int, default=default.staleness, help="bound of stale")
    parser.add_argument(
        "--batch-size", type=int, default=default.batch_size, help="windows, over all processes"
    )
    parser.add_argument("--learning-rate", type=float, default=default.learning_rate)
    parser.add_argument("--slow-ms", type=float, default=0.0, help="naps of each rank, one in four steps")
    args = vars(parser.parse_args())
    mode = args.pop("mode")
    if args["steps"] % args["every"]:
        parser.error(f"--steps {args['steps']} is no multiple of --every {args['every']}.")

    accelerator = Accelerator()
    training, validation = corpus.load()
    started = time.perf_counter()
    result = train(mode, Options(**args), training, validation)
    for windows, loss in result.losses:
        accelerator.print(f"{windows:>6} windows: validation loss {loss:.3f} nats per byte")
    accelerator.print(
        f"{mode}: {result.bytes_sent / 1e6:.1f} MB sent by each process, {time.perf_counter() - started:.1f} s"
    )
    if result.report is not None:
        accelerator.print(result.report)


if __name__ == "__main__":
    main()
