"""Batches that a loader deals out in chunks of the sequence, for scripts of DeepSpeed's sequence parallelism.

Where ``ParallelismConfig(sp_size=...)`` is prepared together with a loader, its batches are this rank's chunks, with
``shift_labels``, and the script weighs the ranks' losses itself. A call of the model is on chunks where one of its
arguments is such a chunk, and else on the whole sequence.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.context.layout import SequenceLayout
from lockstep.parallel.context.region import ContextRegion, regions_of

IGNORED = -100
"""The label of positions that the loss leaves out."""


Around = Callable[[Any, Iterator[object]], Iterator[object]]


def shard_sequences(models: Sequence[nn.Module], before: Around | None = None) -> Around:
    """Return what makes of an iteration over whole batches one over this rank's chunks, for these models."""

    def around(loader: object, batches: Iterator[object]) -> Iterator[object]:
        batches = batches if before is None else before(loader, batches)
        regions = [region for model in models for region in regions_of(model)]
        return _chunks(batches, regions) if regions else batches

    return around


def _chunks(batches: Iterator[object], regions: list[ContextRegion]) -> Iterator[dict[str, object]]:
    for batch in batches:
        whole = _complete(batch)
        length = whole["input_ids"].shape[1]
        regions[0].layout.check(length)
        chunks = {
            name: _chunk(value, whole["input_ids"].shape, regions[0].layout) for name, value in whole.items()
        }
        loader_chunks = {
            id(chunk): (weakref.ref(chunk), whole[name])
            for name, chunk in chunks.items()
            if isinstance(chunk, Tensor) and chunk is not whole[name]
        }
        for region in regions:
            region.loader_chunks = loader_chunks
        yield chunks


def _complete(batch: object) -> dict[str, Any]:
    """Complete a batch with ``position_ids`` and ``shift_labels``, all [batch, sequence].

    Raises:
        UsageError: it has no ``input_ids`` or no ``labels`` of that shape.
    """
    names = ("input_ids", "labels")
    if not isinstance(batch, Mapping) or not all(isinstance(batch.get(name), Tensor) for name in names):
        raise UsageError(
            "ParallelismConfig(sp_size=...) cuts batches along the sequence, but the loader gave a "
            f"{type(batch).__name__} without tensors input_ids and labels. Let the loader return a dictionary "
            "with these tensors."
        )
    tokens, labels = batch["input_ids"], batch["labels"]
    if tokens.ndim != 2 or labels.shape != tokens.shape:
        raise UsageError(
            f"input_ids are {list(tokens.shape)} and labels {list(labels.shape)}, but ParallelismConfig(sp_size=...) "
            "needs [batch, sequence] for both. Pad the labels with -100."
        )
    # Before the cut: a chunk's last label is in another chunk, and its positions do not begin at 0.
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    return {
        "position_ids": positions,
        **batch,
        "shift_labels": F.pad(labels[:, 1:], (0, 1), value=IGNORED),
    }


def _chunk(value: object, shape: torch.Size, layout: SequenceLayout) -> object:
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == shape:
        # A copy, because two names of one tensor are two chunks.
        return layout.local(value, 1).clone()
    return value
