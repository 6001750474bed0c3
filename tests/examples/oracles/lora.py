"""LoRA with a whole base on one process, in a loop of plain torch and peft."""

from __future__ import annotations

from types import ModuleType

import torch
from torch.utils.data import DataLoader

from tests.examples.oracles.steps import step


def losses(recipe: ModuleType, epochs: int, windows: int) -> list[float]:
    """Of each epoch; and that of the last once more, which the merged model must have."""
    model = recipe.make_adapted()
    training, held_out = recipe.text_windows(recipe.LENGTH, windows, windows // 8)
    train, validation = DataLoader(training, 32, shuffle=True), DataLoader(held_out, len(held_out))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    found = []
    for _ in range(epochs):
        model.train()
        for batch in train:
            step(next_byte_loss(model, batch), optimizer, clip=trained)
        model.eval()
        (batch,) = validation
        with torch.no_grad():
            found.append(next_byte_loss(model, batch).item())
    return [*found, found[-1]]


def next_byte_loss(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    return model(input_ids=windows, labels=windows).loss  # transformers shifts the labels itself
