"""With derivation switched off, the first batch stops each way in which splits went wrong; with it, they are right."""

from __future__ import annotations

from typing import Any

import pytest

from tests.verify import rows

REFUSED = {
    3: "It begins in module 'blocks.1",
    4: "loss=sum",
    5: "batch_dims=NAME=none",
    7: "does not compute",
}


@pytest.mark.parametrize("numbers", [[1, 3, 5], pytest.param([4, 7], marks=pytest.mark.exhaustive)], ids=str)
def test_each_row_is_caught_and_its_module_named_where_nothing_is_derived(
    run_distributed: Any, numbers: list[int]
) -> None:
    for results in run_distributed(rows.table, 2, False, numbers, timeout_s=120):
        assert list(results) == numbers
        assert [number for number, (text, _) in results.items() if not text] == []
        assert [number for number, (_, has_stepped) in results.items() if has_stepped] == []
        named = [number for number, (text, _) in results.items() if rows.TABLE[number].module in text]
        assert named == numbers, results


@pytest.mark.exhaustive
def test_each_row_is_right_or_refused_where_it_is_derived(run_distributed: Any) -> None:
    for results in run_distributed(rows.table, 2, True, list(rows.TABLE), timeout_s=120):
        for number, (text, has_stepped) in results.items():
            assert has_stepped == (number not in REFUSED) and REFUSED.get(number, "") in text, text
