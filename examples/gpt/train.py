"""Trains a byte-level GPT on the source code of Python's standard library, in about a minute on two cores.

    lockstep launch --nproc 2 examples/gpt/train.py --out runs/demo
    python examples/gpt/sample.py runs/demo --prompt "def "

Runs as well on one process (`python examples/gpt/train.py`) or on GPUs. A run that was interrupted, by `kill -9` too,
goes on where its last checkpoint was saved with the same command and `--resume`.
Curves: `tensorboard --logdir runs/demo`.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import chain, repeat
from pathlib import Path

import corpus
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import Accelerator, NoCheckpointError, ProjectConfiguration
from lockstep.utils import set_seed, tqdm
from model import GPT, GPTConfig


class Progress:
    """What else a checkpoint of this script must hold: the number of optimizer steps."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def row_losses(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean loss of each window, in nats per byte: [rows, context + 1] bytes to [rows]."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), windows[:, 1:], reduction="none").mean(dim=1)


@torch.no_grad()
def validate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Mean loss over the validation windows, each counted once, whatever the number of processes."""
    model.eval()
    losses = [accelerator.gather_for_metrics(row_losses(model, windows)) for windows in loader]
    model.train()
    return torch.cat(losses).mean().item()


def warmup_then_cosine(steps: int, warmup: int, floor: float = 0.05) -> Callable[[int], float]:
    """The factor of the learning rate at each step: up to 1, then down to `floor`."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="folder of model and curves")
    parser.add_argument("--steps", type=int, default=800, help="optimizer steps")
    parser.add_argument(
        "--validation-windows", type=int, default=3000, help="the last validation uses so many"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="windows per forward, over all processes")
    parser.add_argument("--accumulation", type=int, default=1, help="forwards per optimizer step")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--bf16", action="store_true", help="mixed precision")
    parser.add_argument("--save-every", type=int, default=100, help="optimizer steps between checkpoints")
    parser.add_argument(
        "--resume", action="store_true", help="go on where the last checkpoint in --out was saved"
    )
    args = parser.parse_args()
    checkpoints = args.out / "checkpoints"
    if checkpoints.exists() and not args.resume:
        parser.error(
            f"{checkpoints} belongs to an unfinished run. Go on with --resume, or remove it to start anew."
        )

    accelerator = Accelerator(
        split_batches=True,  # the processes share each batch, so that their number changes nothing but the speed
        mixed_precision="bf16" if args.bf16 else "no",
        gradient_accumulation_steps=args.accumulation,
        log_with=["tensorboard", "jsonl"],
        project_config=ProjectConfiguration(args.out, automatic_checkpoint_naming=True, total_limit=2),
    )
    accelerator.init_trackers("gpt", config={**vars(args), "out": str(args.out)})
    set_seed(0)

    config = GPTConfig()
    training, validation = corpus.load()
    unigram = corpus.unigram_entropy(validation)
    model = GPT(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    accelerator.print(
        f"{len(training) / 1e6:.1f} MB of source code, {parameters / 1e6:.2f} M parameters, "
        f"{accelerator.num_processes} process(es) on {accelerator.device.type}\n"
        f"unigram entropy {unigram:.3f} nats = {unigram / math.log(2):.3f} bits per byte: the loss to beat"
    )

    train_loader = DataLoader(
        corpus.Windows(training, config.context), args.batch_size, shuffle=True, drop_last=True
    )
    check_loader = DataLoader(
        corpus.Windows(validation, config.context, limit=args.validation_windows // 6), 64
    )
    final_loader = DataLoader(corpus.Windows(validation, config.context, limit=args.validation_windows), 64)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = warmup_then_cosine(args.steps, warmup=max(1, args.steps // 20))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    model, optimizer, scheduler, train_loader, check_loader, final_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, check_loader, final_loader
    )

    run = Progress()
    accelerator.register_for_checkpointing(run)
    if args.resume:
        try:
            accelerator.print(f"going on from {accelerator.load_state()} at step {run.step}")
        except NoCheckpointError:
            accelerator.print(f"no checkpoint in {checkpoints} yet: starting at step 0")

    accelerator.measures.total_steps = args.steps  # for `lockstep top` and the report, which say what is left
    tokens_per_step = args.batch_size * args.accumulation * config.context
    check_every, log_every = max(1, args.steps // 5), max(1, args.steps // 70)
    progress = tqdm(total=args.steps, initial=run.step, unit="step", mininterval=1.0, dynamic_ncols=True)
    clock_step, clock = run.step, time.perf_counter()  # the clock restarts at each log
    batches = chain.from_iterable(repeat(train_loader))  # epoch after epoch
    while run.step < args.steps:
        windows = next(batches)
        with accelerator.accumulate(model):
            loss = row_losses(model, windows).mean()
            accelerator.measures.count_tokens(windows[:, 1:].numel())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue

        run.step += 1
        step = run.step
        progress.update()
        if step % log_every == 0 or step == args.steps:
            train_loss = accelerator.reduce(loss.detach(), "mean").item()
            speed = (step - clock_step) * tokens_per_step / (time.perf_counter() - clock)
            clock_step, clock = step, time.perf_counter()
            progress.set_postfix_str(f"loss {train_loss:.3f}, {speed:,.0f} tokens/s", refresh=False)
            accelerator.log({"train/loss": train_loss, "train/tokens_per_s": speed}, step=step)
        if step % check_every == 0 and step < args.steps:
            validation_loss = validate(accelerator, model, check_loader)
            accelerator.log({"validation/loss": validation_loss}, step=step)
            if accelerator.is_main_process:
                progress.write(f"step {step}: validation loss {validation_loss:.3f} nats per byte")
            clock_step, clock = step, time.perf_counter()  # validation is not training time
        if step % args.save_every == 0 and step < args.steps:
            accelerator.save_state(blocking=False)  # written while training goes on
    progress.close()

    validation_loss = validate(accelerator, model, final_loader)
    accelerator.log({"validation/loss": validation_loss}, step=run.step)
    accelerator.print(
        f"validation loss {validation_loss:.3f} nats = {validation_loss / math.log(2):.3f} bits per byte, "
        f"{validation_loss / unigram:.0%} of the unigram entropy"
    )
    accelerator.save_model(model, args.out)
    if accelerator.is_main_process:
        (args.out / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
        text = accelerator.unwrap_model(model).eval().generate(b"def ", length=300)
        accelerator.print(f"--- a sample, from the prompt 'def '\n{text.decode(errors='replace')}\n---")
        accelerator.print(f"saved to {args.out}")
    accelerator.end_training()
    if accelerator.is_main_process:
        shutil.rmtree(checkpoints, ignore_errors=True)  # the run is complete


if __name__ == "__main__":
    main()
