"""The same training loop four times: by hand, with Lockstep, with Accelerate, with Lightning Fabric.

Each is an endless generator that yields after every optimizer step, so that a benchmark can take
turns between them in one process. Model, data, optimizer and order of calls are those of ``Task``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

MAX_NORM = 1.0
SEED = 0


@dataclass(frozen=True)
class Task:
    """What is trained: ``batch_size`` is that of one rank, ``batches`` how many of them an epoch has."""

    make_model: Callable[[], nn.Module]
    make_data: Callable[[int], TensorDataset]
    batch_size: int
    batches: int

    def model(self) -> nn.Module:
        torch.manual_seed(SEED)
        return self.make_model()

    def data(self, world_size: int) -> TensorDataset:
        torch.manual_seed(SEED)
        return self.make_data(self.batch_size * self.batches * world_size)


class SmallGPT(nn.Module):
    """A causal transformer over bytes; (batch, time) integers to (batch, time, 256) logits."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 2, time: int = 64) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(time, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(time), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.token(tokens) + self.position, mask=self.mask, is_causal=True))


def digits_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def digits_data(samples: int) -> TensorDataset:
    return TensorDataset(torch.randn(samples, 64), torch.randint(0, 10, (samples,)))


def gpt_data(samples: int) -> TensorDataset:
    tokens = torch.randint(0, 256, (samples, 65))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


TASKS = {
    "gpt": Task(SmallGPT, gpt_data, batch_size=2, batches=256),
    "digits": Task(digits_model, digits_data, batch_size=16, batches=256),
}


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def hand_written(task: Task, rank: int, world_size: int) -> Iterator[torch.Tensor]:
    """torch alone: DistributedDataParallel with several processes, a plain loop with one."""
    data, model, sampler = task.data(world_size), task.model(), None
    if world_size > 1:
        model = DistributedDataParallel(model)
        sampler = DistributedSampler(data, world_size, rank, shuffle=True, seed=SEED)
    loader = DataLoader(data, task.batch_size, shuffle=sampler is None, sampler=sampler)
    optimizer = optimizer_of(model)
    epoch = 0
    while True:
        if sampler is not None:
            sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            loss.backward()
            clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            yield loss
        epoch += 1


def lockstep(task: Task, rank: int, world_size: int) -> Iterator[torch.Tensor]:
    from lockstep import Accelerator

    return _with_accelerator(Accelerator(cpu=True), task, world_size)


def accelerate(task: Task, rank: int, world_size: int) -> Iterator[torch.Tensor]:
    from accelerate import Accelerator

    return _with_accelerator(Accelerator(cpu=True), task, world_size)


def _with_accelerator(accelerator: Any, task: Task, world_size: int) -> Iterator[torch.Tensor]:
    """One script, whose import alone says which library it is."""
    data, model = task.data(world_size), task.model()
    loader = DataLoader(data, task.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader)
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            yield loss


def fabric(task: Task, rank: int, world_size: int) -> Iterator[torch.Tensor]:
    import lightning

    runner = lightning.Fabric(
        accelerator="cpu", devices=world_size, strategy="ddp" if world_size > 1 else "auto"
    )
    runner.launch()
    data, model = task.data(world_size), task.model()
    model, optimizer = runner.setup(model, optimizer_of(model))
    loader = runner.setup_dataloaders(DataLoader(data, task.batch_size, shuffle=True))
    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            runner.backward(loss)
            runner.clip_gradients(model, optimizer, max_norm=MAX_NORM)
            optimizer.step()
            yield loss


Loop = Callable[[Task, int, int], Iterator[torch.Tensor]]
REFERENCE = "hand-written"
# The reference runs twice: how far its copy's ratio is from 1 is what the machine cannot tell apart.
CONTENDERS: dict[str, Loop] = {
    REFERENCE: hand_written,
    "lockstep": lockstep,
    "accelerate": accelerate,
    "fabric": fabric,
    "hand-written again": hand_written,
}
