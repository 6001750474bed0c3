"""A mixture of experts, all of them in one process, in a loop of plain torch."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from tests.examples.oracles.steps import step


def losses(recipe: ModuleType, epochs: int) -> list[float]:
    torch.manual_seed(0)
    model = recipe.Classifier(capacity_factor=1.25)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    loader = DataLoader(recipe.digit_images()[0], 64, drop_last=True)
    found = []
    for _ in range(epochs):
        of_epoch = []
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            step(loss + 0.02 * recipe.load_balance_loss(model), optimizer)
            of_epoch.append(loss.detach())
        found.append(torch.stack(of_epoch).mean().item())
    return found
