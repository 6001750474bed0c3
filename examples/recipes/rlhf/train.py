"""Trains a policy by reinforcement learning: PPO or GRPO, with four models, on one process or many.

    python examples/recipes/rlhf/train.py
    lockstep launch --nproc 4 examples/recipes/rlhf/train.py --algorithm grpo --group 8 --prompts-per-iteration 8

An iteration is a rollout (answers to new prompts, and what the models say of them) and a few epochs of training on it.
README.md says how to use it with a real model.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from learn import train_epoch
from models import Models, place
from options import SMALL, Options, parse
from rollout import Rollout, collect
from task import SmallTask, TextTask

from checkpoints import Checkpoints, Progress


def train(options: Options) -> list[dict[str, float]]:
    """What was measured in each iteration. Rewards and losses are the same on any number of processes."""
    small = options.model in SMALL
    task: Any = (
        SmallTask(options.seed) if small else TextTask(options.prompts or "", options.model, options.seed)
    )
    models, progress = place(options, task), Progress()
    checkpoints = Checkpoints(models, progress, options)
    if options.resume:
        checkpoints.load()
    while progress.iteration < options.iterations:
        if progress.rollout is None:
            roll(models, progress, task, options)
        else:
            learn(models, progress, progress.rollout, options)
        if checkpoints.boundary():
            break
    models.accelerator.end_training()
    return progress.history


def roll(models: Models, progress: Progress, task: Any, options: Options) -> None:
    """Let the policy answer new prompts, and keep what the models say of the answers."""
    prompts = task.prompts(progress.iteration, options.prompts_per_iteration)
    rows = [prompt for prompt in prompts for _ in range(options.group)]
    rollout, seconds = collect(models, rows, task, options, progress.iteration)
    seconds = slowest(models, seconds)
    tokens = rollout.is_answer.sum().item()
    progress.rollout = rollout
    progress.history.append(
        {
            "reward": rollout.rewards.mean().item(),
            "kl": ((rollout.logprobs - rollout.reference).sum() / tokens).item(),
            "answer tokens": tokens / len(rows),
            "generated tokens/s": tokens / seconds,
        }
    )


def learn(models: Models, progress: Progress, rollout: Rollout, options: Options) -> None:
    """Train on the rollout once more; after the last time another one is due."""
    began = time.perf_counter()
    now = progress.history[-1]
    now |= train_epoch(models, rollout, options, progress.iteration, progress.epoch)
    now["trained tokens/s"] = rollout.mask.sum().item() / slowest(models, time.perf_counter() - began)
    progress.epoch += 1
    if progress.epoch == options.epochs:
        said = "  ".join(f"{name} {value:.4g}" for name, value in now.items())
        models.accelerator.print(f"{progress.iteration:>4}  {said}")
        progress.iteration, progress.epoch, progress.rollout = progress.iteration + 1, 0, None


def slowest(models: Models, seconds: float) -> float:
    """Of all processes."""
    mine = torch.tensor([seconds], device=models.accelerator.device)
    return float(models.accelerator.gather(mine).max())


if __name__ == "__main__":
    train(parse())
