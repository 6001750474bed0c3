"""Rows of batches as numbers: a digest of each, and a few that add up as rows do, by which a sum's terms are known."""

from __future__ import annotations

import zlib
from functools import lru_cache

import torch
from torch import Tensor

from lockstep.comm.collectives import as_bytes


def row_digests(batch: Tensor) -> Tensor:
    """A number for each row of a batch [rows, ...], int64 [rows]; of a 0-d one for all of it, int64 [1]."""
    rows = batch.detach().cpu()
    rows = rows.reshape(1, 1) if rows.ndim == 0 else rows.reshape(len(rows), -1)
    return torch.tensor([zlib.crc32(as_bytes(row).numpy()) for row in rows], dtype=torch.int64)  # type: ignore[arg-type]


COLUMNS = 8
"""Numbers that stand for a row."""
SEED = 0x51C7


def row_sketch(tensor: Tensor) -> Tensor:
    """A tensor [rows, ...] as [rows, at most COLUMNS]; of a 0-d one [1, 1].

    Each row is projected on the same random signs (Johnson and Lindenstrauss), so that S(a + b) = S(a) + S(b), and so
    that some rows of a sketch are the sketch of these rows. Narrow rows stay as they are.
    """
    values = tensor.detach()
    values = values.to_dense() if values.layout is not torch.strided else values
    values = values if values.dtype is torch.float64 else values.float()
    rows = values.reshape(len(values), -1) if values.ndim else values.reshape(1, 1)
    width = rows.shape[1]
    return rows.clone() if width <= COLUMNS else rows @ _signs(width).to(rows)


@lru_cache(maxsize=64)
def _signs(width: int) -> Tensor:
    """[width, COLUMNS] of 1 and -1, over the root of COLUMNS, which keeps norms."""
    # Always the same signs: sketches of several runs are compared.
    generator = torch.Generator().manual_seed(SEED)
    return (2.0 * torch.randint(2, (width, COLUMNS), generator=generator) - 1) / COLUMNS**0.5
