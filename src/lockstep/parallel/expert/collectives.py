"""The ranks among which tokens and experts are spread, and what these do together, with gradients.

Before its counts each rank says which layer it calls, or that its forward is over. A rank that leaves a layer out would
otherwise leave the others waiting, or meet them in another collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.exchange import all_gather_into_tensor
from lockstep.errors import CollectiveMismatchError
from lockstep.model.changes import UncopiedHook
from lockstep.runtime.clock import waiting_for_ranks
from lockstep.torch_internals import compile as torch_compile
from lockstep.torch_internals.autograd import FunctionContext


@dataclass(frozen=True, eq=False)
class Calls:
    """Of the layers ``names`` of one model; ``most``: the most counts that one of them sends."""

    group: dist.ProcessGroup
    names: tuple[str, ...]
    most: int

    def exchange(self, number: int, counts: torch.Tensor) -> torch.Tensor:
        """Return all ranks' counts, [R, *counts.shape]; this rank calls layer ``number``, or -1: its forward is over.

        Raises:
            CollectiveMismatchError: ranks call different layers; on all of them.
        """
        # Of one length for all layers, so that ranks that call different ones meet here and see it.
        message = counts.new_zeros(1 + self.most)
        message[0] = number
        message[1 : 1 + counts.numel()] = counts.flatten()
        ranks = self.group.size()
        every = message.new_empty(ranks * len(message))
        with waiting_for_ranks():
            all_gather_into_tensor(every, message, group=self.group)
        rows = every.view(ranks, -1)
        called = rows[:, 0].tolist()
        if len(set(called)) > 1:
            self._refuse(called)
        return rows[:, 1 : 1 + counts.numel()].reshape(ranks, *counts.shape)

    def __deepcopy__(self, memo: dict[int, object]) -> Calls:
        # Groups cannot be copied.
        return self

    def _refuse(self, called: list[int]) -> None:
        other = next(rank for rank, number in enumerate(called) if number != called[0])
        sentences = [
            f"calls the mixture of experts '{self.names[called[rank]]}'"
            if called[rank] >= 0
            else "ends its forward"
            for rank in (0, other)
        ]
        raise CollectiveMismatchError(
            f"Rank 0 of the group {sentences[0]} while rank {other} {sentences[1]}, but each rank needs the experts of "
            "the others. Call the same layers in the same order on every rank. Where a rank has no tokens for a "
            "layer, call it with none (x[:0])."
        )


class ForwardEndHook(UncopiedHook):
    """A forward hook of the model around the layers: says that this rank's forward is over."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    @torch_compile.disable
    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        device = next(module.parameters()).device
        self.calls.exchange(-1, torch.zeros(0, dtype=torch.int64, device=device))


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
        # Groups cannot be copied, and a copied layer works in the same ones.
        return self

    def gather_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """Return the counts [k, E], int64, of all ranks: [R, k, E]."""
        if self.calls is not None:
            return self.calls.exchange(self.number, counts)
        ranks = self.data.size()
        out = counts.new_empty(ranks * counts.shape[0], *counts.shape[1:])
        with waiting_for_ranks():
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
        with waiting_for_ranks():
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
    rows = rows.contiguous()
    with waiting_for_ranks():
        dist.all_to_all_single(out, rows, list(received), list(sent), group=group)
    return out
