"""With derivation switched off, the first batch stops each way in which splits went wrong; with it, they are right."""

from __future__ import annotations

from typing import Any

import pytest

from tests.check import rows

REFUSED = {3: "'blocks.1' mixes positions outside of attention"}


def test_each_row_is_caught_and_its_module_named_where_nothing_is_derived(run_distributed: Any) -> None:
    for results in run_distributed(rows.table, 2, False, timeout_s=120):
        assert results.keys() == rows.TABLE.keys()
        assert [number for number, (text, _) in results.items() if not text] == []
        assert [number for number, (_, has_stepped) in results.items() if has_stepped] == []
        named = [number for number, (text, _) in results.items() if rows.TABLE[number].module in text]
        assert len(named) >= 6, {number: results[number] for number in results.keys() - set(named)}


@pytest.mark.exhaustive
def test_each_row_is_right_or_refused_where_it_is_derived(run_distributed: Any) -> None:
    for results in run_distributed(rows.table, 2, True, timeout_s=120):
        for number, (text, has_stepped) in results.items():
            assert has_stepped == (number not in REFUSED) and REFUSED.get(number, "") in text, text
