"""A run whose whole state is a formula of its step, so that a loaded state can be told exactly."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, ProjectConfiguration

LATEST_STEP = 40
"""More steps than any run takes; an epoch is longer than that."""


@dataclass(frozen=True)
class Scenario:
    """A way to save again and again.

    ``limit`` is ``total_limit`` of numbered checkpoints; ``explicit``: into one directory, each replacing the last.
    ``cores`` is what Lockstep is told; with more than one it writes files in several threads, in any order.
    """

    name: str
    limit: int | None = None
    explicit: bool = False
    blocking: bool = True
    hooks: bool = False
    ranks: int = 1
    cores: int = 1
    saves: int = 3


class Note:
    """A registered object with a tensor and plain values."""

    def __init__(self) -> None:
        self.step, self.text, self.tensor = 0, "", torch.zeros(3, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "text": self.text, "list": [self.step, -self.step], "tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["list"] == [state["step"], -state["step"]]
        self.step, self.text, self.tensor = state["step"], state["text"], state["tensor"].clone()


class Subject:
    """The run. ``folder`` is where its checkpoints lie, in a project or in one directory."""

    def __init__(self, folder: Path, scenario: Scenario) -> None:
        self.folder, self.scenario = folder, scenario
        self.directory = folder / "state" if scenario.explicit else None
        project = ProjectConfiguration(
            str(folder / "project"),
            automatic_checkpoint_naming=not scenario.explicit,
            total_limit=scenario.limit,
        )
        self.accelerator = Accelerator(cpu=True, project_config=project, step_scheduler_with_optimizer=False)
        model = nn.Linear(5, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 / (1 + epoch))
        rows = torch.arange(2 * (LATEST_STEP + 2))[:, None]
        loader = DataLoader(TensorDataset(rows), batch_size=2 // scenario.ranks)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.note = Note()
        self.accelerator.register_for_checkpointing(self.note)
        if scenario.hooks:
            self.accelerator.register_save_state_pre_hook(self._write_files)
        self._batches: Iterator[Any] | None = None

    @property
    def step(self) -> int:
        return self.note.step

    def advance(self) -> None:
        """One step: takes a batch, and sets everything to what the formula says."""
        self.next_rows()
        self.set(self.step + 1)

    def set(self, step: float) -> None:
        tensors = self._tensors()
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(formula(step, name, tensor))
        scheduler = self.scheduler.scheduler
        scheduler.last_epoch = int(step)
        self.note.step, self.note.text = int(step), f"step {step}"
        _seed(int(step))

    def next_rows(self) -> list[int]:
        """The next batch, which tells where the loader is."""
        if self._batches is None:
            self._batches = iter(self.loader)
        (rows,) = next(self._batches)
        return [int(row) for row in rows.flatten()]

    def save(self) -> None:
        """Returns when the checkpoint is written; in the background, training disturbs its tensors meanwhile."""
        if self.scenario.blocking:
            self.accelerator.save_state(self.directory)
            return
        step = self.step
        self.accelerator.save_state(self.directory, blocking=False)
        self.set(step + 0.5)
        try:
            self.accelerator.wait_for_checkpoint()
        finally:
            self.set(step)

    def load(self) -> None:
        """Raises AssertionError where a file of the hook is of another step than the rest."""
        self._batches = None
        directory = Path(self.accelerator.load_state(self.directory))
        if self.scenario.hooks:
            words, numbers = directory / "extra" / "words.txt", directory / "numbers.bin"
            assert words.read_text() == f"step {self.step}\n" * 100
            assert numbers.read_bytes() == bytes([self.step]) * 1000

    def saves_and_loads(self, step: int) -> str:
        """Save as of this step and load it: "" if all went well, else what did not."""
        try:
            self.set(step)
            self.save()
            self.set(0.25)
            self.load()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        steps = self.steps()
        return "" if set(steps.values()) == {step} else f"after the next save: {steps}"

    def steps(self) -> dict[str, int | None]:
        """Of each part of the state, the step at which it was exactly this; None: at none."""
        found: dict[str, int | None] = {}
        for name, tensor in self._tensors().items():
            step = int(tensor.flatten()[0])
            found[name] = step if torch.equal(tensor, formula(step, name, tensor)) else None
        found["scheduler"] = self.scheduler.scheduler.last_epoch
        found["note"] = self.note.step if self.note.text == f"step {self.note.step}" else None
        for name, state in _generators().items():
            found[name] = known_seeds()[name].get(state)
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        first, *_ = self.next_rows()
        found["loader"] = (first - rank) // 2 if ranks == 2 else first // 2
        return found

    def _tensors(self) -> dict[str, torch.Tensor]:
        model, optimizer = self.accelerator.unwrap_model(self.model), self.optimizer.optimizer
        tensors = {f"model.{name}": parameter.data for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            state = optimizer.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            tensors[f"momentum.{name}"] = state["momentum_buffer"]
        return {**tensors, "note.tensor": self.note.tensor}

    def _write_files(self, models: list[nn.Module], weights: list[dict[str, Any]], directory: str) -> None:
        """A hook as users write it: files in the checkpoint, one of them in a folder."""
        if self.accelerator.is_main_process:
            os.mkdir(f"{directory}/extra")
            with open(f"{directory}/extra/words.txt", "w") as file:
                file.write(f"step {self.step}\n" * 100)
            with open(f"{directory}/numbers.bin", "wb") as binary:
                binary.write(bytes([self.step]) * 1000)


def formula(step: float, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The value of a tensor at this step, exact in its dtype. Every element tells the step and the name."""
    places = torch.arange(tensor.numel(), dtype=tensor.dtype).reshape(tensor.shape)
    return step + (zlib.crc32(name.encode()) % 32) / 64 + places / 4096


def _generators() -> dict[str, bytes]:
    return {
        "random": repr(random.getstate()).encode(),
        "numpy": repr([np.asarray(part).tolist() for part in np.random.get_state()]).encode(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }


@cache
def known_seeds() -> dict[str, dict[bytes, int]]:
    """Of the state of each generator, the step that it was seeded with."""
    found: dict[str, dict[bytes, int]] = {}
    for step in range(LATEST_STEP):
        _seed(step)
        for name, state in _generators().items():
            found.setdefault(name, {})[state] = step
    return found


def _seed(step: int) -> None:
    random.seed(step)
    np.random.seed(step)
    torch.default_generator.manual_seed(step)  # manual_seed formats stacks for devices that are not there
