"""Gradients in 8 bits: a reduce-scatter that sends a quarter of the bytes.

    python examples/from_scratch/int8_gradients.py

A block of 256 numbers is sent as 256 small integers and one scale. Each process sends every other one its chunk, in 8
bits. The receiver turns them back into float32 and adds them up. Nothing is rounded twice.

Paper: Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training, 2023.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from world import Check, count, run, wire

BLOCK, LARGEST = 256, 127


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """[n] in float32 to integers [n] in int8 and scales [n / BLOCK].

    BLOCK must divide n.
    """
    blocks = values.view(-1, BLOCK)
    # The largest number of a block becomes 127 or -127, so nothing is cut off. A block
    # of zeros must not divide by 0.
    scales = (blocks.abs().amax(1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    return (blocks / scales.unsqueeze(1)).round().to(torch.int8).flatten(), scales


def dequantize(integers: Tensor, scales: Tensor) -> Tensor:
    return (integers.view(-1, BLOCK) * scales.unsqueeze(1)).flatten()


def packed(integers: Tensor, scales: Tensor) -> Tensor:
    """Both as one message of bytes: one message costs less than two."""
    return torch.cat([scales.view(torch.int8), integers])


def unpacked(message: Tensor) -> tuple[Tensor, Tensor]:
    scales = message.numel() // (BLOCK + 4)
    return message[4 * scales :], message[: 4 * scales].view(torch.float32)


def quantized_reduce_scatter(gradient: Tensor) -> Tensor:
    """This process's chunk of the mean of all gradients: [n] -> [n / N]."""
    rank, size = dist.get_rank(), dist.get_world_size()
    messages = [packed(*quantize(chunk)) for chunk in gradient.chunk(size)]

    # Not a ring: there a sum is passed on, and would be rounded in each of its N - 1
    # hops. Here everyone sends everyone a chunk, which is the same number of bytes, and
    # each number is rounded once.
    incoming = [torch.empty_like(message) for message in messages]
    incoming[rank] = messages[rank]
    others = [other for other in range(size) if other != rank]
    works = [dist.isend(messages[other], other) for other in others]
    works += [dist.irecv(incoming[other], other) for other in others]
    for work in works:
        work.wait()

    # Back to float32 before the sum: integers of different scales cannot be added.
    return torch.stack([dequantize(*unpacked(message)) for message in incoming]).mean(0)


def error_bound(gradients: list[Tensor], rank: int) -> Tensor:
    """How far each number of the mean may be off: rounding moves a number by at most half a scale."""
    chunks = [gradient.chunk(len(gradients))[rank] for gradient in gradients]
    halves = [(quantize(chunk)[1] / 2).repeat_interleave(BLOCK) for chunk in chunks]
    # A little more for the roundings of float32 itself.
    return torch.stack(halves).mean(0) * 1.0001


def demo(length: int = 64 * 1024) -> list[Check]:
    rank, size = dist.get_rank(), dist.get_world_size()
    gradients = [torch.randn(length, generator=torch.Generator().manual_seed(other)) for other in range(size)]
    # Blocks of very different sizes, as layers have: one scale for all would round
    # small ones to zero.
    gradients = [gradient * torch.logspace(-4, 0, length) for gradient in gradients]

    with wire() as sent:
        mean = quantized_reduce_scatter(gradients[rank])

    exact = torch.stack(gradients).mean(0).chunk(size)[rank]
    error = (mean - exact).abs()
    outside = int((error > error_bound(gradients, rank)).sum())
    relative = (error.norm() / exact.norm()).item()
    in_float32 = (size - 1) * length // size * 4
    return [
        count("numbers that are off by more than the bound", outside, 0),
        Check(
            "error of the mean",
            "below 1%" if relative < 0.01 else f"{relative:.1%}",
            "below 1%",
            relative < 0.01,
        ),
        count("bytes sent: 1 + 4 / 256 for a number", sent.bytes, in_float32 / 4 * (1 + 4 / BLOCK)),
        Check("times fewer bytes than in float32", f"{in_float32 / sent.bytes:.2f}", "3.94", sent.bytes > 0),
    ]


if __name__ == "__main__":
    run(demo, processes=4)
