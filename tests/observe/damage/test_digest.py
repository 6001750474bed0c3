"""The digest is the sum that its docstring says, in Python's own integers; and no change escapes it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.observe.damage import CHUNK_ROWS, COLUMNS, Digester
from tests.marks import examples

WORD = 2**64


def factor(index: int, series: int) -> int:
    """SplitMix64's output for one counter, made odd."""
    x = (index + (series << 32)) * 0x9E3779B97F4A7C15 % WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % WORD
    return (x ^ x >> 31) | 1


def by_hand(content: bytes) -> int:
    padded = content + bytes(-len(content) % 8)
    total = 0
    for place in range(len(padded) // 8):
        word = int.from_bytes(padded[8 * place : 8 * place + 8], "little")
        row, column = divmod(place, COLUMNS)
        total += word * factor(row, 2) * factor(column, 1)
    return total % WORD


def digest(tensor: torch.Tensor) -> int:
    return Digester().digest(tensor).item() % WORD


@pytest.mark.parametrize(
    ("count", "dtype"),
    [
        *((count, torch.float32) for count in (0, 1, 2, 3, 2 * COLUMNS, 2 * COLUMNS + 1, 6 * COLUMNS + 7)),
        *(
            (11, dtype)
            for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.complex64)
        ),
        (5, torch.bool),
    ],
    ids=str,
)
def test_the_digest_is_the_sum_of_words_by_rows_and_columns(count: int, dtype: torch.dtype) -> None:
    tensor = (100 * torch.randn(count, generator=torch.Generator().manual_seed(0))).to(dtype)
    assert digest(tensor) == by_hand(tensor.view(torch.uint8).numpy().tobytes())


def test_more_rows_than_are_multiplied_at_a_time_are_added_up() -> None:
    words = torch.zeros((2 * CHUNK_ROWS + 3) * COLUMNS, dtype=torch.int64)
    row = 2 * CHUNK_ROWS + 1
    words[row * COLUMNS + 5] = 7
    assert digest(words) == 7 * factor(row, 2) * factor(5, 1) % WORD


def test_views_and_strides_do_not_matter() -> None:
    tensor = torch.randn(7, 5)
    assert digest(tensor.T.contiguous().T) == digest(tensor)
    assert digest(tensor[1:]) == digest(tensor[1:].clone())
    assert digest(tensor.flatten()[1:4]) == digest(tensor.flatten()[1:4].clone())  # begins inside of a word
    assert digest(tensor[0, 0]) == digest(tensor[0, :1])


@pytest.mark.parametrize("count", [1, 3, 2 * COLUMNS + 5])
@pytest.mark.parametrize("bit", range(32))
def test_a_flip_of_any_bit_of_any_element_is_seen(count: int, bit: int) -> None:
    digester, tensor = Digester(), torch.randn(count)
    before = digester.digest(tensor).item()
    for place in {0, count // 2, count - 1}:
        tensor.view(torch.int32)[place] ^= -(2**31) if bit == 31 else 1 << bit
        assert digester.digest(tensor).item() != before
        tensor.view(torch.int32)[place] ^= -(2**31) if bit == 31 else 1 << bit
        assert digester.digest(tensor).item() == before


@examples(200)
@given(data=st.data())
def test_any_two_elements_that_change_places_are_seen(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 3 * 2 * COLUMNS))
    one, other = data.draw(
        st.tuples(*[st.integers(0, count - 1)] * 2).filter(lambda pair: pair[0] != pair[1])
    )
    tensor = torch.arange(count, dtype=torch.float32)
    swapped = tensor.clone()
    swapped[[one, other]] = tensor[[other, one]]
    assert digest(swapped) != digest(tensor)


def test_four_changes_that_cancel_in_every_row_and_column_are_seen() -> None:
    words = torch.zeros(2 * COLUMNS, dtype=torch.int64)
    changed = words.clone()
    changed[[3, 9, COLUMNS + 3, COLUMNS + 9]] = torch.tensor([1, -1, -1, 1])
    assert digest(changed) != digest(words)
