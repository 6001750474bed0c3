"""The contrastive loss of whole batches, in a loop of plain torch."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.examples.oracles.steps import step


def results(recipe: ModuleType, epochs: int) -> list[float]:
    """Loss and accuracy of the last epoch."""
    torch.manual_seed(0)
    training, test = recipe.digit_images()
    train, model = DataLoader(training, 128, shuffle=True), recipe.Towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for images, _ in train:
            step(loss(*model(images)), optimizer)
        ((images, _),) = DataLoader(test, len(test))
        with torch.no_grad():
            upper, lower, scale = model(images)
    rank_of_partner = ((upper @ lower.T) > (upper * lower).sum(1, keepdim=True) + 1e-6).sum(1)
    return [loss(upper, lower, scale).item(), (rank_of_partner == 0).float().mean().item()]


def loss(upper: Tensor, lower: Tensor, scale: Tensor) -> Tensor:
    """InfoNCE by its formula: -log(exp(s_ii) / sum_j exp(s_ij)), the mean over rows and columns."""
    products = scale * upper @ lower.T
    rows, columns = products.logsumexp(1), products.logsumexp(0)
    return ((rows + columns) / 2 - products.diagonal()).mean()
