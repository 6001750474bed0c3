"""Whole sequences in a loop of plain torch, and what autograd keeps of them."""

from __future__ import annotations

from types import ModuleType

import torch
from torch.utils.data import DataLoader

from tests.examples.oracles.steps import step


def losses(recipe: ModuleType, steps: int, length: int) -> list[float]:
    torch.manual_seed(0)
    model = recipe.new_model(layers=2, length=length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(recipe.sequences(length), 2, shuffle=True, drop_last=True)
    found = []
    for _, tokens in zip(range(steps), loader, strict=False):
        loss = model(input_ids=tokens, labels=tokens).loss
        step(loss, optimizer, clip=model.parameters())
        found.append(loss.item())
    return found
