"""Distillation in a loop of plain torch; the last batch of an epoch is smaller."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.examples.oracles.steps import step


def losses_and_accuracies(recipe: ModuleType, epochs: int) -> list[float]:
    training, test = recipe.digit_images()
    teacher = recipe.trained_teacher(*training.tensors)
    torch.manual_seed(0)
    student = recipe.new_classifier(width=24, blocks=1)
    optimizer = torch.optim.AdamW(student.parameters(), 4e-3)

    def percent_right(model: nn.Module) -> float:
        right = sum((model(x).argmax(-1) == y).sum().item() for x, y in DataLoader(test, 64))
        return 100 * right / len(test)

    def rows(x: Tensor, y: Tensor) -> Tensor:
        said, wanted = student(x), F.softmax(teacher(x) / 2, -1)
        divergence = (wanted * (wanted.log() - F.log_softmax(said / 2, -1))).sum(-1)
        return 0.9 * 4 * divergence + 0.1 * F.cross_entropy(said, y, reduction="none")

    found = []
    loader = DataLoader(training, 64, shuffle=True)
    for _ in range(epochs):
        of_epoch = []
        for x, y in loader:
            of_rows = rows(x, y)
            step(of_rows.mean(), optimizer)
            of_epoch.append(of_rows.detach())
        found += [torch.cat(of_epoch).mean().item(), percent_right(student)]
    return [*found, percent_right(teacher)]
