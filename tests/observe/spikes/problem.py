"""A training in which the loss or gradients of some steps are spoilt, by Lockstep and in plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lockstep import Accelerator, GradScalerKwargs, SpikePolicy

ROWS, WIDTH, STEPS = 4, 8, 26
KINDS = ("none", "rows", "loss", "gradient", "nan", "inf")
SAVE_EVERY = 4
PLANTED = {10: "rows", 13: "loss", 16: "gradient", 19: "nan", 20: "inf"}
"""Step, counted from 0, and what is wrong with it."""

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Inputs [ROWS, WIDTH], targets [ROWS, 1], and the number of its kind, [ROWS]."""


@dataclass(frozen=True)
class Cell:
    """How a run is made. ``data``: ranks with batches of their own."""

    parallel: str = "ddp"
    data: int = 1
    accumulation: int = 1
    clips: bool = False
    fp16: bool = False

    def __str__(self) -> str:
        words = [self.parallel, f"{self.data} ranks", f"{self.accumulation} micro-batches"]
        return ", ".join([*words, *(["clips"] if self.clips else []), *(["fp16"] if self.fp16 else [])])


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 1))


def make_tools(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


def batches(cell: Cell, planted: Mapping[int, str], leave_out: bool = False) -> list[Batch]:
    """Those of all ranks in turn, step after step. A step is spoilt in its last micro-batch, on the last rank."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(STEPS):
        for place in range(cell.accumulation * cell.data):
            x = torch.randn(ROWS, WIDTH, generator=generator)
            y = x.mean(1, keepdim=True) + 0.3 * torch.randn(ROWS, 1, generator=generator)
            is_last = place == cell.accumulation * cell.data - 1
            kind = KINDS.index(planted.get(step, "none")) if is_last else 0
            if not (leave_out and step in planted):
                found.append((x, y, torch.full((ROWS,), kind)))
    return found


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y, kinds = batch
    kind = KINDS[int(kinds[0])]
    output = model(x * {"rows": 200.0, "nan": float("nan")}.get(kind, 1.0))
    loss = F.mse_loss(output.float(), y)
    if kind == "loss":
        return loss + 500.0
    if kind == "gradient":
        total = 500.0 * output.float().sum()
        return loss + (total - total.detach())
    return loss * float("inf") if kind == "inf" else loss


class Run:
    """A training by Lockstep; ``policy`` None: nobody looks for spikes. ``scale``: of losses, with fp16, at first."""

    def __init__(
        self, cell: Cell, policy: SpikePolicy | None, data: list[Batch], scale: float = 1.0, **options: Any
    ) -> None:
        handlers: list[Any] = [GradScalerKwargs(init_scale=scale, growth_interval=4)]
        self.cell = cell
        self.accelerator = Accelerator(
            cpu=True,
            parallel=cell.parallel,
            mixed_precision="fp16" if cell.fp16 else "no",
            gradient_accumulation_steps=cell.accumulation,
            kwargs_handlers=[*handlers, *([] if policy is None else [policy])],
            **options,
        )
        model = make_model()
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(*(torch.cat(parts) for parts in zip(*data, strict=True))), ROWS
        )
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, *make_tools(model), loader
        )
        self.skipped: list[int] = []

    @property
    def spikes(self) -> Any:
        return self.accelerator.spikes

    def __iter__(self) -> Iterator[int]:
        """Trains; yields the number of micro-batches behind it, after each."""
        for number, batch in enumerate(self.loader):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(loss_of(self.model, batch))
                if self.cell.clips and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients and self.accelerator.optimizer_step_was_skipped:
                self.skipped.append(number // self.cell.accumulation)
            yield number + 1

    def train(self) -> list[int]:
        """Steps that were skipped."""
        for _ in self:
            pass
        return self.skipped

    def train_saving(self, folder: Path) -> list[int]:
        """As ``train``; saves at first, and after each ``SAVE_EVERY`` steps of the loop, skipped ones too."""
        self.accelerator.save_state(folder / "0")
        for behind in self:
            if behind % (SAVE_EVERY * self.cell.accumulation) == 0:
                self.accelerator.save_state(folder / str(behind))
        return self.skipped

    def state(self) -> dict[str, Any]:
        """Parameters, and where schedule and loss scale stand."""
        named = self.accelerator.unwrap_model(self.model).named_parameters()
        scaler = self.accelerator.scaler
        return {
            "rate": self.scheduler.get_last_lr(),
            "scale": None if scaler is None else scaler.state_dict(),
            **{n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in named},
        }


def plainly(cell: Cell, planted: Mapping[int, str]) -> dict[str, torch.Tensor]:
    """Plain torch without the batches of these steps; ranks are averaged as the mean of their gradients."""
    model = make_model()
    optimizer, scheduler = make_tools(model)
    waiting = batches(cell, planted, leave_out=True)
    while waiting:
        window, waiting = waiting[: cell.accumulation * cell.data], waiting[cell.accumulation * cell.data :]
        gradients = []
        for rank in range(cell.data):
            for batch in window[rank :: cell.data]:
                (loss_of(model, batch) / cell.accumulation).backward()
            gradients.append([p.grad / cell.data for p in model.parameters() if p.grad is not None])
            optimizer.zero_grad()
        for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
        if cell.clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        for _ in range(cell.data):
            scheduler.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def only(cell: Cell, steps: list[int], planted: Mapping[int, str] = PLANTED) -> list[Batch]:
    found, window = batches(cell, planted), cell.accumulation * cell.data
    return [one for step in steps for one in found[step * window : (step + 1) * window]]


def run_cells(
    cells: list[Cell], policy: SpikePolicy, kept: list[int], folder: Path | None = None
) -> list[dict[str, Any]]:
    """Of each cell: what the policy did, with checkpoints in ``folder``, and the same training without it, on the
    steps that are ``kept``."""
    torch.set_num_threads(1)
    found = []
    for number, cell in enumerate(cells):
        watched = Run(cell, policy, batches(cell, PLANTED))
        skipped = watched.train() if folder is None else watched.train_saving(folder / str(number))
        spikes = watched.spikes
        counts = (spikes.steps, spikes.steps_skipped, spikes.batches_skipped, spikes.samples_skipped)
        without = Run(cell, None, only(cell, kept))
        assert without.train() == []
        found.append(
            {"skipped": skipped, "counts": counts, "watched": watched.state(), "without": without.state(),
             "state": spikes.state_dict()}
        )  # fmt: skip
        watched.accelerator.free_memory()
        without.accelerator.free_memory()
    return found


def check_cell(cell: Cell, of_ranks: list[dict[str, Any]], lost: int) -> None:
    """All ranks have left the same steps out, ``lost`` with those that were gone back behind, without a trace."""
    for found in of_ranks:
        assert found["skipped"] == list(PLANTED), str(cell)
        micro = lost * cell.accumulation
        assert found["counts"] == (STEPS, lost, micro, micro * cell.data * ROWS), str(cell)
        assert differences(found["watched"], found["without"]) == [], str(cell)
        assert found["state"] == of_ranks[0]["state"], str(cell)


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [
        name
        for name, value in one.items()
        if not (torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name])
    ]


def events_of(folder: Path) -> list[dict[str, Any]]:
    from lockstep.history import EVENTS, read_lines

    return [line for line in read_lines(folder / EVENTS) if line["event"] == "spike"]
