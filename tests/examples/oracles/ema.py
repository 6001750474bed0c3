"""An average of weights in a loop of plain torch."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch.func import functional_call
from torch.utils.data import DataLoader

from tests.examples.oracles.steps import step


def losses(recipe: ModuleType, epochs: int) -> list[float]:
    """After each epoch, of the weights and of their average."""
    training, test = recipe.digit_images()
    torch.manual_seed(0)
    model = recipe.new_model()
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    loader = DataLoader(training, 64, shuffle=True)
    for _ in range(epochs):
        for x, y in loader:
            step(F.cross_entropy(model(x), y), optimizer)
            for name, parameter in model.named_parameters():
                average[name] = 0.95 * average[name] + 0.05 * parameter.detach()
        for weights in ({}, average):
            losses = [
                F.cross_entropy(functional_call(model, weights, x), y, reduction="none")
                for x, y in DataLoader(test, 64)
            ]
            found.append(torch.cat(losses).mean().item())
    return found
