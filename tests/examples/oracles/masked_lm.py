"""Masked language modelling: every hidden byte counts alike, in a loop of plain torch."""

from __future__ import annotations

from types import ModuleType

import torch
from torch.utils.data import DataLoader

from tests.examples.oracles.steps import step


def losses(recipe: ModuleType, epochs: int, windows: int) -> list[float]:
    torch.manual_seed(0)
    train_text, held_out = recipe.text_windows(recipe.LENGTH, windows, windows // 8)
    data, validation = recipe.Masked(train_text, seed=1), recipe.Masked(held_out, seed=2)
    loader = DataLoader(data, 32, shuffle=True)
    model = recipe.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    found = []
    for epoch in range(epochs):
        data.set_epoch(epoch)
        model.train()
        for inputs, labels in loader:
            # transformers' mean over hidden bytes
            step(model(input_ids=inputs, labels=labels).loss, optimizer)
        model.eval()
        with torch.no_grad():
            ((inputs, labels),) = DataLoader(validation, len(validation))
            found.append(model(input_ids=inputs, labels=labels).loss.item())
    return found
