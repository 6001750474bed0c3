"""Ring attention: each rank keeps its queries, while keys and values travel around the ranks.

Partial results are merged by their log-sum-exps, exactly. With causal attention and the head-tail layout, what a
rank computes at each step after the first is half of a full block, on every rank alike.

References: Liu et al., Ring Attention with Blockwise Transformers for Near-Infinite Context, 2023; Brandon et al.,
Striped Attention, 2023 (balance).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.parallel.context.kernels import kernel_for
from lockstep.parallel.context.layout import SequenceLayout

KEYS, GRADIENTS = 0, 2
"""Tags of messages: of each pair, the first is that of keys."""


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Attention of this rank's queries to all ranks' keys.

    ``q`` [b, h, s, d], ``k`` and ``v`` [b, g, s, d] are this rank's chunk, in the head-tail layout; g divides h.
    Sent by each rank of N: (N - 1) times its keys and values in forward; in backward these again, and as many
    gradients in fp32. Sums over keys are in fp32.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = _RingAttention.apply(q, k, v, layout, causal, scale)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, causal: bool, scale: float
    ) -> Tensor:
        kernel, groups = kernel_for(q), q.shape[1] // k.shape[1]
        k, v = k.contiguous(), v.contiguous()
        ctx.layout, ctx.causal, ctx.scale = layout, causal, scale
        keys, values = k, v
        merged = None
        for step in range(layout.size):
            coming = _pass_on((keys, values), layout, KEYS) if step + 1 < layout.size else None
            seen, shown = _visible(layout, step, causal, q.shape[2])
            part = kernel.forward(
                q[:, :, seen], _repeat(keys[:, :, shown], groups), _repeat(values[:, :, shown], groups),
                causal and step == 0, scale,
            )  # fmt: skip
            merged = _start(*part) if merged is None else _merge(*merged, seen, *part)
            if coming is not None:
                keys, values = coming.wait()
        assert merged is not None
        out = merged[0].to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged[1])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        layout, causal, scale = ctx.layout, ctx.causal, ctx.scale
        kernel, groups, gradient = (
            kernel_for(q),
            q.shape[1] // k.shape[1],
            gradients[0].to(q.dtype).contiguous(),
        )
        exact = lse.dtype
        dq = torch.zeros(q.shape, dtype=exact, device=q.device)
        own = [torch.zeros(t.shape, dtype=exact, device=q.device) for t in (k, v)]
        keys, values = k, v
        travelling = None  # the gradients of the keys at hand, from the ranks that had them before
        for step in range(layout.size):
            coming = _pass_on((keys, values), layout, KEYS) if step + 1 < layout.size else None
            seen, shown = _visible(layout, step, causal, q.shape[2])
            block = (q[:, :, seen], _repeat(keys[:, :, shown], groups), _repeat(values[:, :, shown], groups))
            part = kernel.backward(
                gradient[:, :, seen], block, (out[:, :, seen], lse[:, :, seen]), causal and step == 0, scale
            )
            dq[:, :, seen] += part[0]
            if step == 0:
                sums: Sequence[Tensor] = own
            else:
                sums = [torch.zeros_like(t) for t in own] if travelling is None else travelling.wait()
            for total, new in zip(sums, part[1:], strict=True):
                total[:, :, shown] += _folded(new.to(exact), groups)
            if step > 0:
                travelling = _pass_on(sums, layout, GRADIENTS)
            if coming is not None:
                keys, values = coming.wait()
        if travelling is not None:
            own = [mine + others for mine, others in zip(own, travelling.wait(), strict=True)]
        dk, dv = own
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


# -- what is computed at each step -------------------------------------------------------------------------


def _visible(layout: SequenceLayout, step: int, causal: bool, length: int) -> tuple[slice, slice]:
    """Rows of queries and columns of keys that matter at ``step``, where the keys of rank - step are at hand.

    An earlier rank's head is before, and its tail behind, all of this rank's queries. A later rank's chunks lie
    between this rank's head and tail.
    """
    everything = slice(0, length)
    if not causal or step == 0:
        return everything, everything
    head = layout.sizes(length)[0]
    if step <= layout.rank:  # from an earlier rank
        return everything, slice(0, head)
    return slice(head, length), everything


def _start(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    # Copies, because sums go into them, and what a kernel returned may be kept by activation checkpointing.
    return out.to(lse.dtype, copy=True), lse.clone()


def _merge(out: Tensor, lse: Tensor, rows: slice, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over two sets of keys from the softmax over each."""
    before = lse[:, :, rows]
    total = torch.logaddexp(before, part_lse)
    out[:, :, rows] *= (before - total).exp()[..., None]
    out[:, :, rows] += part * (part_lse - total).exp()[..., None]
    lse[:, :, rows] = total
    return out, lse


def _repeat(tensor: Tensor, groups: int) -> Tensor:
    """Each key head for every query head that uses it."""
    return tensor.repeat_interleave(groups, dim=1) if groups > 1 else tensor


def _folded(gradient: Tensor, groups: int) -> Tensor:
    return gradient.unflatten(1, (-1, groups)).sum(2) if groups > 1 else gradient


# -- what travels --------------------------------------------------------------------------------------------


class _Coming:
    """Tensors on their way from the rank before. Holds those that are being sent."""

    def __init__(self, tensors: list[Tensor], sent: Sequence[Tensor], works: list[dist.Work]) -> None:
        self._tensors, self._sent, self._works = tensors, sent, works

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        return self._tensors


def _pass_on(tensors: Sequence[Tensor], layout: SequenceLayout, tag: int) -> _Coming:
    """Start to send to the next rank and to receive as much from the one before."""
    ranks = dist.get_process_group_ranks(layout.group)
    after, before = ranks[(layout.rank + 1) % layout.size], ranks[layout.rank - 1]
    received = [torch.empty_like(tensor) for tensor in tensors]
    operations = []
    for number, (out, into) in enumerate(zip(tensors, received, strict=True), start=tag):
        operations.append(dist.P2POp(dist.isend, out, after, layout.group, tag=number))
        operations.append(dist.P2POp(dist.irecv, into, before, layout.group, tag=number))
    return _Coming(received, tensors, dist.batch_isend_irecv(operations))
