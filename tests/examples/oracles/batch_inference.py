"""Each prompt by itself, greedily, without padding, a batch or a cache."""

from __future__ import annotations

from types import ModuleType

import torch


@torch.no_grad()
def answers(recipe: ModuleType, prompts: list[str], tokens: int) -> list[str]:
    model, found = recipe.new_model(), []
    for prompt in prompts:
        said = list(prompt.encode())
        for _ in range(tokens):
            logits = model(input_ids=torch.tensor([said]), use_cache=False).logits[0, -1]
            said.append(int(logits.argmax()))
            if said[-1] < 32:
                break
        new = [token for token in said[len(prompt.encode()) :] if 32 <= token < 256]
        found.append(bytes(new).decode(errors="replace"))
    return found
