"""The training script that is audited: one leg of it on one rank, from the start or from a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from checkpoint.audit.loaders import EPOCHS
from checkpoint.audit.model import MAX_NORM, make_model, make_optimizer
from checkpoint.audit.trials import Trial
from lockstep import (
    Accelerator,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProjectConfiguration,
    set_seed,
)

REFERENCE, BEFORE, AFTER = "reference", "before", "after"
"""Names of legs: the run that is not interrupted, and what comes before and after the stop of the other."""
KILLED_WITHIN_S = 60.0


class Ledger:
    """What this rank consumed, a line for each micro-batch, written at once: SIGKILL takes none of it back."""

    def __init__(self, folder: Path, leg: str, rank: int) -> None:
        self._file = os.open(folder / f"{leg}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, **line: Any) -> None:
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)


class Progress:
    """Counts micro-batches, as a script would: a registered object."""

    def __init__(self) -> None:
        self.micro_batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {"micro_batches": self.micro_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.micro_batches = state["micro_batches"]


@dataclass
class Final:
    """How a leg ended: its first micro-batch, the whole parameters, and digests of all that must be bit-identical."""

    start: int
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


class Run:
    """Everything anew, from ``seed``: weights, generators, order of the data."""

    def __init__(self, trial: Trial, leg: str, folder: Path, seed: int) -> None:
        torch.set_num_threads(1)
        set_seed(seed, device_specific=True)
        self.trial = trial
        kind = trial.kind
        self.accelerator = Accelerator(
            cpu=True,
            parallel=trial.parallel[leg == AFTER],
            mixed_precision=trial.precision,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=trial.accumulation),
            dataloader_config=DataLoaderConfiguration(**kind.options),
            project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2),
            kwargs_handlers=[GradScalerKwargs(init_scale=256.0, growth_interval=3)],
        )
        self.model = make_model(seed, is_random=trial.same_world)
        optimizer, schedule = make_optimizer(trial.optimizer, self.model)
        loader = kind.make(self.accelerator.num_processes, trial.same_world)
        self.prepared, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            self.model, optimizer, loader, schedule
        )
        self.progress = Progress()
        self.accelerator.register_for_checkpointing(self.progress)
        self.ledger = Ledger(folder, leg, self.accelerator.process_index)

    def train(
        self, stop: int | None = None, behind_loop: bool = False, saves: frozenset[int] = frozenset()
    ) -> None:
        """To the end, or up to micro-batch ``stop``, where the state is saved.

        ``saves``: where the state is saved besides, now and then in the background.
        """
        if stop == self.progress.micro_batches:
            self.accelerator.save_state()
            return
        while self.loader.epoch < EPOCHS:
            for numbers, features, labels in self.loader:
                self.step(numbers, features, labels)
                done = self.progress.micro_batches
                if done in saves and (self.trial.saves_windows or self.accelerator.sync_gradients):
                    self.accelerator.save_state(blocking=done % 2 == 0)
                if done == stop and not (behind_loop and self.accelerator.gradient_state.end_of_dataloader):
                    self.accelerator.save_state()
                    return
            if self.progress.micro_batches == stop:
                self.accelerator.save_state()
                return

    def step(self, numbers: torch.Tensor, features: torch.Tensor, labels: torch.Tensor) -> None:
        run, trial = self.accelerator, self.trial
        with run.accumulate(self.prepared):
            losses = F.cross_entropy(self.prepared(features).float(), labels, reduction="none")
            weights = run.sample_weights()
            if trial.kind.even:
                run.backward(losses.mean())
            else:
                run.backward(losses, weight=weights)
            if trial.clips and run.sync_gradients:
                run.clip_grad_norm_(self.prepared.parameters(), MAX_NORM)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        is_sample = [True] * len(numbers) if weights is None else weights.bool().tolist()
        self.ledger.write(
            number=self.progress.micro_batches,
            epoch=self.loader.epoch - 1,
            samples=numbers.tolist(),
            is_sample=is_sample,
            losses=losses.detach().tolist(),
        )
        self.progress.micro_batches += 1

    def final(self, start: int) -> Final:
        state = {name: whole(value) for name, value in self.model.state_dict().items()}
        named = {name for name, _ in self.model.named_parameters()}
        everything = {
            "model": state,
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "loader": self.loader.epoch,
            "scaler": self.accelerator.scaler.state_dict() if self.accelerator.scaler else None,
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
        }
        self.ledger.close()
        self.accelerator.end_training()
        parameters = {name: value for name, value in state.items() if name in named}
        return Final(start, parameters, digests(everything))


def uninterrupted(trial: Trial, folder: Path) -> Final:
    run = Run(trial, REFERENCE, folder, trial.seed)
    run.train()
    return run.final(0)


def until_the_stop(trial: Trial, folder: Path) -> None:
    run = Run(trial, BEFORE, folder, trial.seed)
    run.train(trial.stop, trial.behind_loop)
    run.accelerator.end_training()
    run.ledger.close()


def until_killed(trial: Trial, folder: Path) -> None:
    """Saves at random; at its end it waits for the signal that was meant to come earlier."""
    run = Run(trial, BEFORE, folder, trial.seed)
    total = EPOCHS * trial.kind.steps(trial.before)
    saves = random.Random(trial.seed).sample(range(1, total + 1), 5)
    run.train(saves=frozenset(saves))
    time.sleep(KILLED_WITHIN_S)


def from_the_newest(trial: Trial, folder: Path) -> Final:
    """Another seed: what is not loaded is different."""
    run = Run(trial, AFTER, folder, trial.seed + 1)
    run.accelerator.load_state()
    start = run.progress.micro_batches
    run.train()
    return run.final(start)


def whole(value: Any) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def digests(tree: Any, path: str = "") -> dict[str, str]:
    """By path, of each value's bits; of a DTensor those that this rank holds."""
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, (list, tuple)):
        items = list(enumerate(tree))
    else:
        tree = tree.to_local() if hasattr(tree, "to_local") else tree
        if isinstance(tree, torch.Tensor):
            # safe for bf16, which NumPy lacks
            tree = (
                str(tree.dtype),
                tuple(tree.shape),
                tree.detach().contiguous().view(-1).view(torch.uint8).tolist(),
            )
        elif isinstance(tree, np.ndarray):
            tree = (str(tree.dtype), tree.shape, tree.tobytes())
        return {path: hashlib.sha256(repr(tree).encode()).hexdigest()}
    found: dict[str, str] = {}
    for key, value in items:
        found |= digests(value, f"{path}.{key}" if path else str(key))
    return found
