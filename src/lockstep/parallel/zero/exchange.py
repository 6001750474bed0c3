"""FSDP2's collectives for the CPU, in fewer copies than gloo's own and with the same bytes.

With torch 2.13 and 2 to 8 ranks on one machine, from 4 MiB up, broadcasts of all ranks' parts at once take 0.6 to
0.8 of the time of gloo's all-gather, and an all-to-all with a local sum 0.3 to 0.6 of that of its reduce-scatter
(``benchmarks/collectives.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from lockstep.comm.collectives import all_gather_into_tensor, reduce_scatter_tensor
from lockstep.errors import UsageError
from lockstep.torch_internals import c10d

MOST_RANKS = 8
"""Groups above this use gloo's own: nobody has measured them."""


class ShardCollective:
    """The part of FSDP2's ``Comm`` that says where buffers come from: from the allocator, as torch's own."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class BroadcastAllGather(ShardCollective):
    """FSDP2's ``AllGather``: each rank broadcasts its part, all at once."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """``input_tensor`` (n,) of every rank, in rank order, into ``output_tensor`` (N n,)."""
        if async_op or group.size() > MOST_RANKS:
            work: dist.Work | None = all_gather_into_tensor(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
            return work
        parts = output_tensor.chunk(group.size())
        own = parts[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():  # FSDP2 puts it there itself
            own.copy_(input_tensor)
        # All are started before the first is waited for, so that every rank sends at once.
        under_way = [
            dist.broadcast(part, group=group, group_src=rank, async_op=True)
            for rank, part in enumerate(parts)
        ]
        for one in under_way:
            one.wait()
        return None


class ExchangeReduceScatter(ShardCollective):
    """FSDP2's ``ReduceScatter``: an all-to-all and a sum in rank order."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` (N n,) over the ranks; this rank's part of the result into ``output_tensor`` (n,).

        Raises:
            UsageError: ``op`` is not SUM, AVG or PREMUL_SUM.
        """
        factor = factor_of(op, group.size())
        if group.size() > MOST_RANKS:
            work: dist.Work | None = reduce_scatter_tensor(
                output_tensor, input_tensor, op, group=group, async_op=async_op
            )
            return work
        # Row r of what is received is what rank r adds to this rank's part; rows are always summed in this order.
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, out=output_tensor)
        if factor != 1:
            output_tensor.mul_(factor)
        return None


def factor_of(op: object, world_size: int) -> Any:
    """What the sum over the ranks is multiplied by: a number, or a tensor inside PREMUL_SUM."""
    kind, factor = c10d.reduction_of(op)
    if kind == dist.ReduceOp.SUM:
        return 1
    if kind == dist.ReduceOp.AVG:
        return 1 / world_size
    if kind == dist.ReduceOp.PREMUL_SUM and factor is not None:
        return factor
    raise UsageError(
        f"Gradients of shards cannot be reduced with {kind.name}. Use SUM, AVG or PREMUL_SUM with a factor."
    )


def exchange_on_cpu(groups: Sequence[Any]) -> None:
    """Set these collectives on modules that were sharded over a CPU mesh, if this torch lets them be set."""
    for module in groups:
        if hasattr(FSDPModule, "set_custom_all_gather"):
            module.set_custom_all_gather(BroadcastAllGather())
        if hasattr(FSDPModule, "set_custom_reduce_scatter"):
            module.set_custom_reduce_scatter(ExchangeReduceScatter())
