"""Runs as their tensors: a trace of them, and what ranks of a candidate measure beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lockstep.comm import ShardRegion
from lockstep.verify import (
    ItemKind,
    Measured,
    ParityVerdict,
    Recording,
    RunFacts,
    Tolerance,
    Trace,
    TraceComparison,
    TraceItem,
    judge_runs,
    read_measured,
    tolerance_of,
)

Tensors = Mapping[TraceItem, Tensor]
Shard = tuple[Tensor, tuple[int, ...], list[ShardRegion]]
"""A local part, the shape of the whole, and the boxes."""
LocalTensors = Mapping[TraceItem, "Tensor | Shard"]


def record(path: Path, tensors: Tensors) -> Trace:
    """A trace of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sink = Recording(path)
    for item, tensor in tensors.items():
        sink.add(item, tensor, tensor.shape, [])
    sink.close({})
    return Trace(path)


def measure(
    trace: Trace, folder: Path, ranks: Sequence[LocalTensors], allowed: Tolerance | None = None
) -> tuple[list[Measured], dict[int, Trace]]:
    """What each rank measures, and the parts that it keeps."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, tensors in enumerate(ranks):
        sink = TraceComparison(trace, folder, rank, allowed)
        for item, local in tensors.items():
            part, shape, boxes = local if isinstance(local, tuple) else (local, tuple(local.shape), [])
            sink.add(item, part, shape, boxes)
        sink.close({})
    lines = list(read_measured(sorted(folder.glob("measured-*.jsonl"))))
    kept = {
        rank: Trace(folder / f"found-{rank}.safetensors") for rank in range(len(ranks)) if allowed is not None
    }
    return lines, kept


def verdict_of(
    folder: Path,
    reference: Tensors,
    ranks: Sequence[LocalTensors],
    *,
    disturbed: Tensors | None = None,
    half: Tensors | None = None,
    dtype: torch.dtype = torch.float32,
    facts: RunFacts | None = None,
) -> ParityVerdict:
    """The verdict on ranks of a candidate. ``disturbed``: without it, everything is off by a rounding step."""
    trace = record(folder / "reference.safetensors", reference)
    off, _ = measure(trace, folder / "disturbed", [disturbed or shaken(reference)])
    in_half = [] if half is None else measure(trace, folder / "half", [half])[0]
    allowed = tolerance_of(trace, off, in_half, dtype)
    lines, kept = measure(trace, folder / "candidate", ranks, allowed)
    return judge_runs(trace, allowed, lines, facts or RunFacts(nproc=len(ranks), data_ranks=len(ranks)), kept)


def shaken(tensors: Tensors, seed: int = 1, eps: float = 1.2e-7) -> dict[TraceItem, Tensor]:
    """Each element of each float tensor off by up to a rounding step."""
    generator = torch.Generator().manual_seed(seed)
    return {
        item: tensor * (1 + eps * (2 * torch.rand(tensor.shape, generator=generator) - 1)).to(tensor.dtype)
        if tensor.is_floating_point() and item.kind is not ItemKind.RATE
        else tensor
        for item, tensor in tensors.items()
    }


def shard(whole: Tensor, rank: int, ranks: int) -> Shard:
    """The rows of a rank."""
    size = whole.shape[0] // ranks
    offsets, zeros = (rank * size, *(0,) * (whole.ndim - 1)), (0,) * whole.ndim
    region = ShardRegion(offsets, (size, *whole.shape[1:]), zeros)
    return whole[rank * size : (rank + 1) * size].clone(), tuple(whole.shape), [region]


def synthetic(steps: int = 2, data_ranks: int = 2, seed: int = 0) -> dict[TraceItem, Tensor]:
    """The tensors of a run of a model of two layers; its numbers mean nothing."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=generator)

    names = ("first", "second")
    tensors: dict[TraceItem, Tensor] = {}
    for name in names:
        tensors[TraceItem(0, ItemKind.WEIGHT, f"{name}.weight")] = random(8, 8, scale=0.1)
        tensors[TraceItem(0, ItemKind.WEIGHT, f"{name}.bias")] = random(8, scale=0.1)
    for step in range(1, steps + 1):
        for of in range(data_ranks):
            digests = torch.randint(1 << 40, (4,), generator=generator)
            tensors[TraceItem(step, ItemKind.BATCH, "", data_rank=of, path="x")] = digests
            for name in names:
                tensors[TraceItem(step, ItemKind.OUTPUT, name, data_rank=of)] = random(4, 8)
            tensors[TraceItem(step, ItemKind.LOSS, "", data_rank=of)] = random().abs() + 1
            for name in reversed(names):
                tensors[TraceItem(step, ItemKind.OUTPUT_GRADIENT, name, data_rank=of)] = random(
                    4, 8, scale=1e-2
                )
        for kind in (ItemKind.GRADIENT, ItemKind.CLIPPED, ItemKind.UPDATE):
            for name in names:
                tensors[TraceItem(step, kind, f"{name}.weight")] = random(8, 8, scale=1e-2)
                tensors[TraceItem(step, kind, f"{name}.bias")] = random(8, scale=1e-2)
        tensors[TraceItem(step, ItemKind.NORM, "")] = random().abs() + 1
        tensors[TraceItem(step, ItemKind.RATE, "")] = torch.tensor(1e-3 * 0.9**step, dtype=torch.float64)
        tensors[TraceItem(step, ItemKind.BUFFER, "first.mean")] = random(8)
    return tensors


def ranks_of(
    tensors: Tensors, ranks: int, data_ranks: int | None = None, seed: int = 100
) -> list[dict[TraceItem, Tensor]]:
    """What ranks hold if all is right: copies, and each the items of its own batch; off by rounding."""
    number = data_ranks or ranks
    off = shaken(tensors, seed, 6e-8)
    return [
        {item: one.clone() for item, one in off.items() if item.data_rank in (-1, rank * number // ranks)}
        for rank in range(ranks)
    ]
