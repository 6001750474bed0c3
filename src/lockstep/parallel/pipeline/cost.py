"""How long each block takes, by which stages can be balanced."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


@torch.no_grad()
def block_seconds(
    model: nn.Module, blocks: Mapping[str, nn.Module], *args: Any, repeats: int = 3, **kwargs: Any
) -> dict[str, float]:
    """Name -> seconds of a block's forward: the least of ``repeats`` runs of ``model(*args, **kwargs)`` on one device.

    For ``PipelineOptions.block_costs``. Every rank must balance by the same numbers: measure on one.
    """
    least = dict.fromkeys(blocks, float("inf"))
    began: dict[str, float] = {}

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def begin(name: str) -> Any:
        return lambda *_: began.__setitem__(name, now())

    def end(name: str) -> Any:
        return lambda *_: least.__setitem__(name, min(least[name], now() - began[name]))

    handles = []
    for name, block in blocks.items():
        handles += [block.register_forward_pre_hook(begin(name)), block.register_forward_hook(end(name))]
    try:
        for _ in range(repeats):
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return least
