"""The byte-level GPT of examples/gpt, in a loop of plain torch."""

from __future__ import annotations

from types import ModuleType

import torch
from torch.utils.data import DataLoader

from tests.examples.oracles.steps import step


def losses(recipe: ModuleType, steps: int, validation_windows: int) -> list[float]:
    """The loss on the validation windows."""
    torch.manual_seed(0)
    config = recipe.GPTConfig()
    training, held_out = recipe.corpus.load()
    model = recipe.GPT(config)
    loader = DataLoader(recipe.corpus.Windows(training, config.context), 32, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    factor = recipe.warmup_then_cosine(steps, warmup=max(1, steps // 20))
    for number, windows in zip(range(steps), loader, strict=False):
        optimizer.param_groups[0]["lr"] = 4e-3 * factor(number)
        step(recipe.row_losses(model, windows).mean(), optimizer, clip=model.parameters())
    model.eval()
    validation = DataLoader(recipe.corpus.Windows(held_out, config.context, limit=validation_windows), 100)
    with torch.no_grad():
        return [torch.cat([recipe.row_losses(model, windows) for windows in validation]).mean().item()]
