"""Which sizes are tried: against going through all of them."""

from __future__ import annotations

from math import log2

from lockstep.tune import next_size


def test_the_largest_that_fits_is_found_in_few_trials() -> None:
    for rows in range(1, 130):
        sizes = [size for size in range(1, rows + 1) if rows % size == 0]
        for start in sizes:
            for most in range(rows + 1):
                fits: dict[int, bool] = {}
                while (size := next_size(sizes, start, fits)) is not None:
                    assert size in sizes and size not in fits, (rows, start, most, fits)
                    fits[size] = size <= most
                found = max((size for size, does in fits.items() if does), default=None)
                assert found == max((size for size in sizes if size <= most), default=None)
                assert len(fits) <= 2 * log2(rows) + 4, (rows, start, most, fits)


def test_a_size_alone_is_compared_with_a_smaller_one() -> None:
    assert next_size([1, 2, 4, 8], 8, {8: True}) == 4
    assert next_size([1, 2, 4, 8], 8, {8: True, 4: True}) is None
    assert next_size([1], 1, {1: True}) is None
    assert next_size([1, 3, 9], 9, {9: True}) == 3
