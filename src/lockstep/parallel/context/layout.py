"""Which positions of a sequence each rank holds, and the way from the whole sequence to its chunk and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lockstep.comm.exchange import all_gather_into_tensor, reduce_scatter_tensor
from lockstep.config.enums import CPMethod
from lockstep.errors import UsageError
from lockstep.runtime.clock import waiting_for_ranks
from lockstep.torch_internals.autograd import FunctionContext

FEWEST_POSITIONS = 2
"""Positions a rank must have: a chunk of one would broadcast against tensors that it does not fit."""


@dataclass(frozen=True)
class SequenceLayout:
    """A sequence in N chunks, or head and tail: in 2N, of which rank r holds chunks r and 2N - 1 - r.

    With causal attention later positions see more keys, so that equal contiguous chunks would be unequal work;
    the pair (r, 2N - 1 - r) sees the same number on every rank (Brandon et al., Striped Attention, 2023, balance
    by stripes; the pairing of chunks is known as zig-zag). Where a rank has an odd number of positions, heads have
    one more than tails.
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    head_tail: bool

    @property
    def chunks(self) -> int:
        return 2 * self.size if self.head_tail else self.size

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Return numbers of the chunks that ``rank`` holds, in the order in which it holds them."""
        return (rank, 2 * self.size - 1 - rank) if self.head_tail else (rank,)

    def fits(self, length: int) -> bool:
        """Return whether ``length`` positions can be dealt out evenly."""
        return length % self.size == 0 and length >= self.size * FEWEST_POSITIONS

    def check(self, length: int, what: str = "The sequence") -> None:
        """Raise UsageError if ``length`` positions cannot be dealt out evenly."""
        if self.fits(length):
            return
        fitting = max(-(-length // self.size) * self.size, self.size * FEWEST_POSITIONS)
        raise UsageError(
            f"{what} has {length} positions, which do not divide into cp = {self.size} equal chunks of at least "
            f"{FEWEST_POSITIONS} positions for each rank. Pad it to {fitting} positions."
        )

    def sizes(self, count: int) -> list[int]:
        """Positions in each part of a rank's ``count``: head and tail, or all."""
        return [count - count // 2, count // 2] if self.head_tail else [count]

    def local(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's chunk, [..., length / N, ...] along ``dim``. Its gradient is zero in others' positions."""
        chunks = self._chunks(whole, dim)
        parts = [chunks[number] for number in self.chunks_of(self.rank)]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0].contiguous()

    def _chunks(self, whole: Tensor, dim: int) -> tuple[Tensor, ...]:
        # All heads come before all tails in the sequence, so that only two sizes of chunks follow each other.
        sizes = self.sizes(whole.shape[dim] // self.size)
        return whole.split([size for size in sizes for _ in range(self.size)], dim)

    def gather(self, local: Tensor, dim: int) -> Tensor:
        """Join all chunks to [..., length, ...], in order. Its gradient is the sum of all ranks'."""
        if local.is_floating_point():
            return _GatherShards.apply(local, dim, self)
        return self.joined(self.collect(local), dim)

    def collect(self, local: Tensor) -> Tensor:
        """Gather every rank's chunk, [N, *local.shape]."""
        if local.dtype is torch.bool:
            return self.collect(local.view(torch.uint8)).view(torch.bool)
        parts = local.new_empty((self.size, *local.shape))
        with waiting_for_ranks():
            all_gather_into_tensor(parts.flatten(0, 1), local.contiguous(), group=self.group)
        return parts

    def joined(self, parts: Tensor, dim: int) -> Tensor:
        """Join [N, ..., length / N, ...] to the whole sequence [..., length, ...], in order."""
        chunks: list[Tensor] = [parts[0]] * self.chunks
        for rank in range(self.size):
            mine = parts[rank].split(self.sizes(parts[rank].shape[dim]), dim)
            for number, chunk in zip(self.chunks_of(rank), mine, strict=True):
                chunks[number] = chunk
        return torch.cat(chunks, dim)

    def shard_of(self, whole: Tensor, dim: int) -> Tensor:
        """Invert ``joined``: [..., length, ...] to [N, ..., length / N, ...]."""
        chunks = self._chunks(whole, dim)
        return torch.stack(
            [torch.cat([chunks[n] for n in self.chunks_of(rank)], dim) for rank in range(self.size)]
        )


def layout_on(mesh: DeviceMesh, method: CPMethod) -> SequenceLayout:
    """Return the layout of ``method`` on a 1-D mesh: head and tail for the ring, contiguous for Ulysses."""
    head_tail = method is CPMethod.RING
    return SequenceLayout(mesh.get_group(), mesh.size(), mesh.get_local_rank(), head_tail)


class _GatherShards(torch.autograd.Function):
    """An all-gather, and as its exact adjoint a reduce-scatter."""

    @staticmethod
    def forward(ctx: FunctionContext, local: Tensor, dim: int, layout: SequenceLayout) -> Tensor:
        ctx.dim, ctx.layout = dim, layout
        return layout.joined(layout.collect(local), dim)

    @staticmethod
    def backward(ctx: FunctionContext, *gradients: Tensor) -> tuple[Tensor, None, None]:
        parts = ctx.layout.shard_of(gradients[0], ctx.dim)
        local = torch.empty_like(parts[0])
        with waiting_for_ranks():
            reduce_scatter_tensor(local, parts.flatten(0, 1), group=ctx.layout.group)
        return local, None, None
