"""DiLoCo in one process: each worker is a copy of the model, and the outer optimizer is torch's SGD."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader


def validation_losses(recipe: ModuleType, workers: int, steps: int, every: int) -> list[float]:
    """After each round."""
    start, batches, checked = model_and_data(recipe)
    models = [copy.deepcopy(start) for _ in range(workers)]
    optimizers = [torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.95)) for model in models]
    outer = torch.optim.SGD(start.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    found = []
    for _ in range(0, steps, every):
        for _ in range(every):
            parts = next(batches).chunk(workers)
            for model, optimizer, part in zip(models, optimizers, parts, strict=True):
                step(recipe, model, optimizer, part)
        with torch.no_grad():
            for parameter, *ended in zip(start.parameters(), *(m.parameters() for m in models), strict=True):
                parameter.grad = parameter - torch.stack(list(ended)).mean(0)
        outer.step()
        for model in models:
            model.load_state_dict(start.state_dict())
        found.append(loss_of(recipe, start, checked))
    return found


def synchronous_losses(recipe: ModuleType, steps: int, every: int) -> list[float]:
    """The same without workers."""
    model, batches, checked = model_and_data(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.95))
    found = []
    for _ in range(0, steps, every):
        for _ in range(every):
            step(recipe, model, optimizer, next(batches))
        found.append(loss_of(recipe, model, checked))
    return found


def model_and_data(recipe: ModuleType) -> tuple[nn.Module, Iterator[Tensor], Tensor]:
    """A new model, batches to train on, and the windows of a validation."""
    training, validation = recipe.corpus.load()
    context = recipe.Options().config.context
    (checked,) = DataLoader(recipe.corpus.Windows(validation, context, limit=128), 128)
    torch.manual_seed(0)
    model = recipe.GPT(recipe.Options().config)
    windows = recipe.corpus.Windows(training, context)
    return model, iter(DataLoader(windows, 16, shuffle=True, drop_last=True)), checked


def step(recipe: ModuleType, model: nn.Module, optimizer: torch.optim.Optimizer, windows: Tensor) -> None:
    recipe.mean_loss(model, windows).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def loss_of(recipe: ModuleType, model: nn.Module, windows: Tensor) -> float:
    return recipe.mean_loss(model, windows).item()
