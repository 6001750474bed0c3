"""How long each block takes, by which stages can be balanced."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lockstep.comm.collectives import Communicator
from lockstep.errors import UsageError
from lockstep.model.blocks import find_blocks
from lockstep.parallel.pipeline.assign import balanced
from lockstep.runtime import process


@torch.no_grad()
def block_seconds(
    model: nn.Module, blocks: Mapping[str, nn.Module], *args: object, repeats: int = 3, **kwargs: object
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


def measured_split(
    model: nn.Module,
    stages: int,
    *args: object,
    blocks: tuple[str, ...] = (),
    repeats: int = 3,
    **kwargs: object,
) -> tuple[str, ...]:
    """Names for ``split=`` by which ``stages`` take about equally long: what rank 0 measures. Collective.

    Call it before ``prepare``, on every rank, with one micro-batch as ``args`` and ``kwargs``.

    Args:
        blocks: As the word ``blocks`` of ``parallel``.

    Raises:
        UsageError: fewer blocks than stages.
    """
    found = find_blocks(model, blocks)
    if len(found) < stages:
        raise UsageError(
            f"{type(model).__name__} has {len(found)} blocks, which do not make {stages} stages. Ask for fewer stages."
        )
    seconds = [block_seconds(model, found, *args, repeats=repeats, **kwargs)]
    Communicator(process.start()).broadcast_object_list(seconds)
    starts = balanced([seconds[0][name] for name in found], 0.0, 0.0, stages)
    names = list(found)
    return tuple(names[start] for start in starts[1:])
