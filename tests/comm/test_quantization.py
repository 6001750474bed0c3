"""Block quantisation against its error bound, computed value by value in Python's and numpy's float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.comm import dequantize, from_message, message_bytes, quantize, to_message
from lockstep.errors import ConfigError, UsageError
from tests.marks import examples
from tests.refusals import expect_refusal

LEVELS = {8: 127, 4: 7}
TYPES = [torch.float32, torch.bfloat16, torch.float16]
LARGEST = (2 - 2.0**-22) * 2.0**127  # closer to the largest float32, a block may become infinite
SMALLEST = 2.0**-149


def bound(values: torch.Tensor, block: int, bits: int) -> np.ndarray:
    """The largest allowed error of each value of a vector."""
    exact = np.abs(values.double().numpy())
    starts = range(0, len(exact), block)
    largest = [np.full(len(exact[i : i + block]), exact[i : i + block].max()) for i in starts]
    peak = np.concatenate([np.zeros(0), *largest])
    return np.maximum(peak / (2 * LEVELS[bits]), 2.0**-127) + peak * 2.0**-22


def error(values: torch.Tensor, block: int, bits: int) -> np.ndarray:
    message = to_message(values, block, bits)
    assert message.dtype == torch.uint8 and message.is_contiguous()
    assert message.shape == (message_bytes(len(values), block, bits),)
    decoded = from_message(message, len(values), block, bits)
    assert decoded.dtype == torch.float32
    return np.abs(decoded.double().numpy() - values.double().numpy())


floats = st.floats(-LARGEST, LARGEST, width=32, allow_subnormal=True)


@examples(300)
@given(st.lists(floats, max_size=40), st.integers(1, 12), st.sampled_from([8, 4]))
@example([0.0, -0.0, 0.0], 2, 4)
@example([SMALLEST, -190 * SMALLEST, 0.0], 3, 8)  # scales that are not normal numbers would not hold these
@example([SMALLEST] * 5, 4, 4)
@example([2.0**-126, 2.0**-119, 127 * 2.0**-126], 1, 8)
@example([1.0, 1e-30, 1e30], 3, 8)
def test_every_value_comes_back_within_half_a_step_of_its_block(given_values, block, bits) -> None:
    values = torch.tensor(given_values, dtype=torch.float32)
    assert (error(values, block, bits) <= bound(values, block, bits)).all()


@examples(100)
@given(
    count=st.integers(0, 1100),
    seed=st.integers(0, 2**16),
    exponent=st.floats(-20, 4),
    dtype=st.sampled_from(TYPES),
    bits=st.sampled_from([8, 4]),
)
def test_the_bound_holds_for_16_bit_types_and_any_length(count, seed, exponent, dtype, bits) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)).mul(2.0**exponent).to(dtype)
    assert (error(values, 256, bits) <= bound(values, 256, bits)).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_the_bound_is_reached_by_values_halfway_between_two_levels(bits: int) -> None:
    values = torch.tensor([float(LEVELS[bits]), 1.5])
    assert error(values, 256, bits).max() == bound(values, 256, bits)[0] - LEVELS[bits] * 2.0**-22 == 0.5


def test_four_bits_put_the_first_of_two_neighbours_in_the_low_half() -> None:
    packed, scales = quantize(torch.tensor([7.0, -7.0, 1.0, -1.0, -3.0]), bits=4)
    assert packed.tolist() == [0x97, 0xF1, 0x0D]
    assert scales.tolist() == [1.0]


def test_a_message_is_the_scales_and_then_the_integers() -> None:
    values = torch.tensor([127.0, -1.0, 254.0, 2.0, -127.0])
    message = to_message(values, block=2, bits=8).numpy().tobytes()
    assert np.frombuffer(message[:12], np.float32).tolist() == [1.0, 2.0, 1.0]
    assert np.frombuffer(message[12:], np.int8).tolist() == [127, -1, 127, 1, -127]


@pytest.mark.parametrize("largest", [0.0, SMALLEST, 190 * SMALLEST, 2.0**-126, 1.0])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_scale_is_a_normal_number_so_that_dividing_by_it_gives_an_integer_in_range(bits, largest) -> None:
    values = torch.tensor([largest, -largest])
    _, scales = quantize(values, bits=bits)
    assert scales.item() >= 2.0**-126
    assert (values.double() / scales.double()).abs().max() < LEVELS[bits] + 0.5


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 255, 256, 600])
def test_what_is_not_finite_makes_its_block_so_and_no_other(bits, dtype, bad, place) -> None:
    values = torch.linspace(-2, 2, 601).to(dtype)
    values[place] = bad
    decoded = from_message(to_message(values, bits=bits), len(values), bits=bits)
    expected = torch.arange(601) // 256 != place // 256
    assert torch.equal(decoded.isfinite(), expected)
    in_half = torch.empty(601, dtype=torch.float16)
    from_message(to_message(values, bits=bits), len(values), bits=bits, out=in_half)
    assert torch.equal(in_half.isfinite(), expected)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_largest_values_of_16_bit_types_stay_finite(dtype: torch.dtype) -> None:
    values = torch.tensor([LARGEST if dtype is torch.float32 else torch.finfo(dtype).max, 1.0], dtype=dtype)
    out = torch.empty_like(values)
    from_message(to_message(values), 2, out=out)
    assert out.isfinite().all()


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1001])
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_quantised_as_if_each_were_alone(count: int, bits: int) -> None:
    rows = torch.randn(3, count, generator=torch.Generator().manual_seed(0))
    messages = to_message(rows, bits=bits)
    assert messages.shape == (3, message_bytes(count, bits=bits))
    decoded = from_message(messages, count, bits=bits)
    for i in range(3):
        assert torch.equal(messages[i], to_message(rows[i].clone(), bits=bits))
        assert torch.equal(decoded[i], from_message(messages[i], count, bits=bits))


def test_a_strided_input_and_an_output_of_another_type_are_taken_as_they_are() -> None:
    values = torch.randn(300, 4, generator=torch.Generator().manual_seed(0)).T
    out = torch.empty(4, 300, dtype=torch.bfloat16)
    packed, scales = quantize(values)
    assert dequantize(packed, scales, 300, out=out) is out
    assert torch.equal(out, dequantize(*quantize(values.contiguous()), 300).bfloat16())


@given(st.integers(0, 10**12), st.integers(1, 4096))
def test_the_size_of_a_message_is_the_formula(count: int, block: int) -> None:
    assert message_bytes(count, block, 8) == count + 4 * math.ceil(count / block)
    assert message_bytes(count, block, 4) == -(-count // 2) + 4 * -(-count // block)


def test_other_widths_blocks_types_and_sizes_are_refused() -> None:
    expect_refusal(ConfigError, "bits is 2", message_bytes, 4, bits=2)
    expect_refusal(ConfigError, "block is 0", to_message, torch.ones(4), block=0)
    for dtype in (torch.float64, torch.int32, torch.uint8):
        with pytest.raises(UsageError, match=f"{dtype} cannot be quantised"):
            quantize(torch.ones(4, dtype=dtype))
    expect_refusal(UsageError, "2 bytes and 1 scales", dequantize, *quantize(torch.ones(4)), 4, bits=4)


@pytest.mark.parametrize("bits", [8, 4])
def test_no_value_is_read_on_the_host_so_that_no_device_is_waited_for(bits: int) -> None:
    values = torch.empty(3, 1001, device="meta")  # any read of a value would raise here
    message = to_message(values, bits=bits)
    assert from_message(message, 1001, bits=bits).shape == values.shape
