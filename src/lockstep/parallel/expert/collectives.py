"""The ranks among which tokens and experts are spread, and what these do together, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lockstep.comm.collectives import all_gather_into_tensor
from lockstep.parallel.expert.agreement import Calls
from lockstep.torch_internals.autograd import FunctionContext


@dataclass(frozen=True, eq=False)
class Ranks:
    """Who routes tokens together, and who holds the experts together.

    ``data``: the ranks whose batches make up the global one, in its order. ``experts``: those among which the
    experts are spread, None where every rank has all. ``members``: where these are in ``data``. ``calls``: with
    experts spread, how the ranks agree on the layer ``number`` that is called.
    """

    data: dist.ProcessGroup
    experts: dist.ProcessGroup | None
    members: tuple[int, ...]
    calls: Calls | None = None
    number: int = 0

    def __deepcopy__(self, memo: dict[int, object]) -> Ranks:
        return self  # groups cannot be copied, and a copied layer works in the same ones

    def gather_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """The counts [k, E], int64, of all ranks: [R, k, E]."""
        if self.calls is not None:
            return self.calls.exchange(self.number, counts)
        ranks = self.data.size()
        out = counts.new_empty(ranks * counts.shape[0], *counts.shape[1:])
        all_gather_into_tensor(out, counts.contiguous(), group=self.data)
        return out.view(ranks, *counts.shape)


class SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' tensors, of one shape. Backward: the sum of all ranks' gradients.

    So a rank's gradients are those of the sum of all ranks' losses, which averaging turns into those of the mean.
    """

    @staticmethod
    def forward(ctx: FunctionContext, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: FunctionContext, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return SumOverRanks.apply(gradient, ctx.group), None


class AllToAll(torch.autograd.Function):
    """Rows [n, ...]: ``sent[p]`` of them to rank p, ``received[p]`` from it, in rank order. Backward: the way back."""

    @staticmethod
    def forward(
        ctx: FunctionContext,
        rows: torch.Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: FunctionContext, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return AllToAll.apply(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


class ScaledGradient(torch.autograd.Function):
    """The tensor, of any shape, as it is; backward multiplies its gradient by ``factor``."""

    @staticmethod
    def forward(ctx: FunctionContext, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: FunctionContext, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


def _exchange(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out
