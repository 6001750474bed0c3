"""Sketches: they add up, parts of them are those of parts, and they keep norms about."""

from __future__ import annotations

import pytest
import torch

from lockstep.parity.trace import COLUMNS, row_sketch


@pytest.mark.parametrize("shape", [(12, 300), (6, 3, 5, 5), (40,), (5, COLUMNS)], ids=str)
def test_sketches_add_up_and_have_the_rows_of_the_whole(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    torch.testing.assert_close(row_sketch(one + 0.5 * other), row_sketch(one) + 0.5 * row_sketch(other))
    torch.testing.assert_close(row_sketch(one)[2:4], row_sketch(one[2:4]))
    assert row_sketch(one).shape[1] <= COLUMNS
    assert 0.7 < float(row_sketch(one).norm() / one.norm()) < 1.4


def test_tensors_without_rows_and_sparse_ones_have_sketches_too() -> None:
    assert row_sketch(torch.tensor(3.0)).tolist() == [[3.0]]
    dense = torch.randn(4, 20)
    torch.testing.assert_close(row_sketch(dense.to_sparse()), row_sketch(dense))
