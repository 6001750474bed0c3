"""Few numbers of each row of a matrix, which add up as the rows do: by them a sum is known again by its terms."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

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
    generator = torch.Generator().manual_seed(SEED)
    return (2.0 * torch.randint(2, (width, COLUMNS), generator=generator) - 1) / COLUMNS**0.5
