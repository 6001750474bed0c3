"""The step of a loop of plain torch."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def step(
    loss: torch.Tensor, optimizer: torch.optim.Optimizer, clip: Iterable[torch.nn.Parameter] | None = None
) -> None:
    """Go one step; ``clip``: the parameters whose gradients have a norm of 1 at most."""
    loss.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(list(clip), 1.0)
    optimizer.step()
    optimizer.zero_grad()
