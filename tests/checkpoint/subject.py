"""A small run with everything that has a state, which tests give damaged and hostile checkpoints to load."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, ProjectConfiguration

FEATURES, CLASSES, ROWS = 6, 3, 48


class History:
    """An object of the user's with tensors, containers and numbers in its state."""

    def __init__(self) -> None:
        self.mean = torch.zeros(4)
        self.seen: Counter[int] = Counter()
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "seen": self.seen, "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.seen, self.losses = state["mean"].clone(), state["seen"], list(state["losses"])


class Subject:
    """A run whose numbered checkpoints lie in ``project``."""

    def __init__(self, project: Path) -> None:
        torch.manual_seed(0)
        configuration = ProjectConfiguration(str(project), automatic_checkpoint_naming=True)
        self.accelerator = Accelerator(
            cpu=True, mixed_precision="fp16", project_config=configuration, run_dir="no"
        )
        model = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        rows = TensorDataset(torch.randn(ROWS, FEATURES), torch.randint(0, CLASSES, (ROWS,)))
        loader = DataLoader(rows, batch_size=4, shuffle=True)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.history = History()
        self.accelerator.register_for_checkpointing(self.history)

    @property
    def plain_model(self) -> nn.Module:
        model: nn.Module = self.accelerator.unwrap_model(self.model)
        return model

    def train_and_save(self, steps: int) -> Path:
        """Some steps, then a numbered checkpoint in the middle of the epoch."""
        for step, (rows, labels) in enumerate(self.loader, start=1):
            loss = F.cross_entropy(self.model(rows), labels)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.history.losses.append(loss.item())
            self.history.seen[step] += 1
            self.history.mean += loss.item()
            if step == steps:
                break
        return Path(self.accelerator.save_state())

    def scramble(self, seed: int) -> None:
        """Make everything other than in any checkpoint, without Lockstep."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in (*self.plain_model.parameters(), *self._optimizer_tensors(), self.history.mean):
                tensor.copy_(torch.rand(tensor.shape, generator=generator))
            for parameter in self.plain_model.parameters():
                parameter.grad = torch.rand(parameter.shape, generator=generator)
        self.scheduler.scheduler.last_epoch = 1000 + seed
        self.history.losses = [float(seed)]
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def fingerprint(self) -> dict[str, str]:
        """Digests of all state, part by part, taken from torch's own objects."""
        groups = [
            sorted((key, value) for key, value in group.items() if key != "params")
            for group in self.optimizer.optimizer.param_groups
        ]
        scaler = self.accelerator.scaler
        return {
            "weights": _digest(self.plain_model.state_dict().values()),
            "optimizer": _digest(self._optimizer_tensors()),
            "groups": repr(groups),
            "scheduler": repr(sorted(self.scheduler.scheduler.state_dict().items())),
            "scaler": repr(None if scaler is None else sorted(scaler.state_dict().items())),
            "position": repr(_by_digest(self.loader.state_dict())),
            "history": repr((self.history.mean, self.history.seen, self.history.losses)),
            **generators(),
        }

    def writes(self) -> dict[str, str]:
        """What any write of torch changes, even of the value that was there: versions, places and gradients."""
        tensors = {**self.plain_model.state_dict(keep_vars=True), "mean": self.history.mean}
        tensors.update({f"optimizer {i}": tensor for i, tensor in enumerate(self._optimizer_tensors())})
        gradients = [p.grad for p in self.plain_model.parameters() if p.grad is not None]
        return {
            "versions": repr(
                {name: (tensor._version, tensor.data_ptr()) for name, tensor in tensors.items()}
            ),
            "gradients": _digest(gradients),
        }

    def _optimizer_tensors(self) -> list[torch.Tensor]:
        optimizer = self.optimizer.optimizer
        states = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
        values = [value for state in states for _, value in sorted(state.items())]
        return [value for value in values if isinstance(value, torch.Tensor)]


def generators() -> dict[str, str]:
    """Digests of the states of all generators."""
    _, words, position, *gauss = np.random.get_state()
    return {
        "random": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        "numpy": f"{hashlib.sha256(np.asarray(words).tobytes()).hexdigest()} {position} {gauss}",
        "torch": _digest([torch.get_rng_state()]),
    }


def _by_digest(value: Any) -> Any:
    """Lists and dicts with a digest in place of each tensor, whose repr takes milliseconds."""
    if isinstance(value, dict):
        return {key: _by_digest(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_by_digest(one) for one in value]
    return _digest([value]) if isinstance(value, torch.Tensor) else value


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
