"""Rows of batches as numbers."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from lockstep.comm.collectives import as_bytes


def row_digests(batch: Tensor) -> Tensor:
    """Return a number for each row of a batch [rows, ...], int64 [rows]; of a 0-d one for all of it, int64 [1]."""
    rows = batch.detach().cpu()
    rows = rows.reshape(1, 1) if rows.ndim == 0 else rows.reshape(len(rows), -1)
    return torch.tensor([zlib.crc32(as_bytes(row).numpy()) for row in rows], dtype=torch.int64)  # type: ignore[arg-type]
