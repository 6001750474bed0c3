"""Gather what a metric is computed from: every sample once, no padding."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.comm.collectives import Communicator
from lockstep.comm.tree import leaves, map_tensors
from lockstep.runtime.step import StepState


def gather_for_metrics(
    communicator: Communicator, step: StepState, data: Any, rank: int, use_gather_object: bool = False
) -> Any:
    """Gather ``data`` from all ranks, without the rows that only pad the current batch.

    The active loader knows how many of this rank's rows are samples; the others are cut off before
    anything is sent, so the result has exactly the global batch's samples, in rank order.

    Args:
        data: Nested tensors, or a list of any objects. Tensors and lists whose length is a multiple
            k of the batch's rows are taken as k entries a row; others are gathered whole. A vector as
            long as a full batch, while the last batch is shorter, is cut to that batch's samples: so
            scripts repeat a loss for ``batch_size`` samples.
        use_gather_object: Gather ``data`` as objects even though it holds tensors only.
    """
    rows, real = _own_rows(step, rank)
    full = getattr(step.active_dataloader, "batch_size", None) or rows
    if use_gather_object or not _all_tensors(data):
        if rows != real and isinstance(data, (list, tuple)):
            data = data[: _kept(len(data), rows, real)]
        return communicator.gather_object(data)
    if rows != real or 0 < rows < full:
        data = map_tensors(lambda tensor: _cut(tensor, rows, real, full), data)
    return communicator.gather(data)


def sample_weights(step: StepState, rank: int, device: torch.device) -> torch.Tensor | None:
    """Per row of this rank's batch: 1 for a sample, 0 for padding; float32 of shape (rows,).

    None outside of a prepared loader, or where it cannot count.
    """
    if step.counts is None:
        return None
    rows, real = _own_rows(step, rank)
    weights = torch.ones(rows, device=device)
    weights[real:] = 0
    return weights


def _own_rows(step: StepState, rank: int) -> tuple[int, int]:
    counts = step.counts
    return (counts.rows[rank], counts.real[rank]) if counts is not None else (0, 0)


def _cut(tensor: torch.Tensor, rows: int, real: int, full: int) -> torch.Tensor:
    if 0 < rows < full and tensor.shape == (full,):
        return tensor[:real]
    return tensor if tensor.dim() == 0 else tensor[: _kept(tensor.shape[0], rows, real)]


def _kept(length: int, rows: int, real: int) -> int:
    return length // rows * real if rows and length % rows == 0 else length


def _all_tensors(data: Any) -> bool:
    """Whether every leaf is a tensor, and there is one."""
    found = leaves(data).values()
    return len(found) > 0 and all(isinstance(leaf, torch.Tensor) for leaf in found)
