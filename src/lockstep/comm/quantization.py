"""Blocks of numbers as small integers with one scale each, so that a collective moves fewer bytes.

Symmetric and per block: with L = 127 (8 bits) or 7 (4 bits) and A the largest absolute value of a block,
the scale is s = A / L and a value v becomes the integer q = round(v / s), which stands for q s.

**Error of one element.** |v / s| <= L, so nothing is clipped, and rounding to the nearest integer moves v / s
by at most 1/2, hence v by at most s / 2:

    |q s - v| <= A / (2 L), which is A / 254 with 8 bits and A / 14 with 4.

In float32 the roundings of s, v / s and q s (2^-24 relative each) add less than 2^-22 A. Scales are at least
2^-126, the smallest normal float32, so that nothing is divided by zero; where that raises s, the error is at
most 2^-127. Zeros stay zeros. A result in a 16-bit type is rounded once more, to that type.

**Not finite.** An infinity or a NaN makes A, then s and then every element of its block infinite or NaN.
A block whose A is within 2^-23 (relative) of the largest float32 may become infinite too.

Reference: the block quantisation of Wang et al., ZeRO++, 2023.
"""

from __future__ import annotations

import torch

from lockstep.errors import ConfigError, UsageError

BLOCK = 256
LEVELS = {8: 127, 4: 7}
TYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def message_bytes(count: int, block: int = BLOCK, bits: int = 8) -> int:
    """Return bytes of ``count`` values as a message: ``bits`` for each, rounded up, and four for each block's scale."""
    _check(block, bits)
    return _payload_bytes(count, bits) + 4 * _ceil_div(count, block)


def to_message(values: torch.Tensor, block: int = BLOCK, bits: int = 8) -> torch.Tensor:
    """Return ``values`` (..., n) as uint8 (..., message_bytes(n)): the blocks' scales, then the integers.

    Raises:
        ConfigError, UsageError: as :func:`quantize`.
    """
    packed, scales = quantize(values, block, bits)
    return torch.cat([scales.view(torch.uint8), packed], dim=-1)


def from_message(
    message: torch.Tensor, count: int, block: int = BLOCK, bits: int = 8, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the inverse of :func:`to_message`: (..., message bytes) to (..., count) in float32, or written into
    ``out``.

    Raises:
        ConfigError, UsageError: as :func:`dequantize`.
    """
    _check(block, bits)
    scales = torch.empty(
        (*message.shape[:-1], _ceil_div(count, block)), dtype=torch.float32, device=message.device
    )
    scale_bytes = 4 * scales.shape[-1]
    # Copied, not viewed: float32 must lie at a multiple of four bytes, and the rows of messages need not.
    scales.view(torch.uint8).copy_(message[..., :scale_bytes])
    return dequantize(message[..., scale_bytes:], scales, count, block, bits, out)


@torch.no_grad()
def quantize(values: torch.Tensor, block: int = BLOCK, bits: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers and scales of ``values`` (..., n), in blocks along the last dim, of which the last may be shorter.

    Returns uint8 (..., n) or, with 4 bits, (..., ceil(n / 2)), where a byte holds two neighbours, the first
    in its low half, in two's complement; and the scales, float32 (..., ceil(n / block)).

    Raises:
        ConfigError: ``bits`` is neither 8 nor 4, or ``block`` is not positive.
        UsageError: ``values`` are not float32, bfloat16 or float16.
    """
    _check(block, bits)
    if values.dtype not in TYPES:
        raise UsageError(f"Values of {values.dtype} cannot be quantised. Pass float32, bfloat16 or float16.")
    levels = torch.empty_like(values, dtype=torch.float32, memory_format=torch.contiguous_format)
    scales = []
    for part, target in zip(_blocks(values, block), _blocks(levels, block), strict=True):
        # The largest absolute value, without a tensor of absolute values.
        low, high = torch.aminmax(part, dim=-1)
        scale = torch.maximum(high, -low).float().div_(LEVELS[bits]).clamp_min_(SMALLEST_SCALE)
        torch.div(part, scale.unsqueeze(-1), out=target)
        scales.append(scale)
    integers = levels.round_().to(torch.int8)
    return _packed(integers, bits), torch.cat(scales, dim=-1)


@torch.no_grad()
def dequantize(
    packed: torch.Tensor,
    scales: torch.Tensor,
    count: int,
    block: int = BLOCK,
    bits: int = 8,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the values (..., count) that ``quantize`` took, within its error: float32, or written into ``out``
    (..., count).

    Raises:
        ConfigError: ``bits`` is neither 8 nor 4, or ``block`` is not positive.
        UsageError: ``packed`` or ``scales`` have not the size of ``count`` values.
    """
    _check(block, bits)
    sizes, expected = (
        (packed.shape[-1], scales.shape[-1]),
        (_payload_bytes(count, bits), _ceil_div(count, block)),
    )
    if sizes != expected:
        raise UsageError(
            f"{count} values of {bits} bits in blocks of {block} are {expected[0]} bytes and {expected[1]} "
            f"scales, but {sizes[0]} and {sizes[1]} were given. Pass the tensors that quantize returned, with "
            "the same arguments."
        )
    integers = _unpacked(packed, count, bits)
    if out is None:
        out = torch.empty(integers.shape, dtype=torch.float32, device=packed.device)
    parts = _blocks(integers, block)
    part_scales = scales.split([part.shape[-2] for part in parts], dim=-1)
    for part, scale, target in zip(parts, part_scales, _blocks(out, block), strict=True):
        torch.mul(part, scale.unsqueeze(-1), out=target)
    return out


def _blocks(values: torch.Tensor, block: int) -> list[torch.Tensor]:
    """Return views of (..., n): the whole blocks as (..., n // block, block), then the rest as (..., 1, n % block)."""
    count = values.shape[-1]
    whole = count // block
    parts = [values[..., : whole * block].unflatten(-1, (whole, block))]
    if count % block:
        parts.append(values[..., whole * block :].unsqueeze(-2))
    return parts


def _packed(integers: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 8:
        return integers.view(torch.uint8)
    packed = integers[..., 0::2] & 0x0F
    # The last of an odd number has no neighbour: the high half of its byte stays 0.
    packed[..., : integers.shape[-1] // 2] |= integers[..., 1::2] << 4
    return packed.view(torch.uint8)


def _unpacked(packed: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    signed = packed.view(torch.int8)
    if bits == 8:
        return signed
    integers = signed.new_empty((*packed.shape[:-1], count))
    # The second shift copies the sign.
    integers[..., 0::2] = (signed << 4) >> 4
    integers[..., 1::2] = signed[..., : count // 2] >> 4
    return integers


def _payload_bytes(count: int, bits: int) -> int:
    return _ceil_div(count * bits, 8)


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _check(block: int, bits: int) -> None:
    if bits not in LEVELS:
        raise ConfigError(f"bits is {bits}, but must be 8 or 4. Pass one of these.")
    if block < 1:
        raise ConfigError(f"block is {block}, but must be at least 1. Pass {BLOCK}, for instance.")
