"""Ring attention: each rank keeps its queries, while keys and values travel around the ranks.

Partial results are merged by their log-sum-exps, exactly. With causal attention and the head-tail layout, what a
rank computes at each step after the first is half of a full block, on every rank alike.

``q`` is [b, h, s, d], ``k`` and ``v`` are [b, h, t, d]; ``lse`` [b, h, s] is log Σ_j exp(scale q·k_j), in fp32. A
kernel's backward takes the output and log-sum-exp over *all* keys and gives the gradients that belong to the keys at
hand.

References: Liu et al., Ring Attention with Blockwise Transformers for Near-Infinite Context, 2023; Brandon et al.,
Striped Attention, 2023 (balance).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.parallel.context.layout import SequenceLayout
from lockstep.runtime.clock import waiting_for_ranks
from lockstep.torch_internals import kernels
from lockstep.torch_internals.autograd import FunctionContext

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
    return _RingAttention.apply(q, k, v, layout, causal, scale)


class _RingAttention(torch.autograd.Function):
    """At step i the keys of rank r - i are at hand. They are sent on before they are used, so that sending is hidden.

    In backward the keys go round once more. The gradients of a rank's keys travel one step behind them, so that each
    rank adds its part to what has come from the rank before, and after the last step they are at home.
    """

    @staticmethod
    def forward(
        ctx: FunctionContext,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: SequenceLayout,
        causal: bool,
        scale: float,
    ) -> Tensor:
        kernel, groups = kernel_for(q), q.shape[1] // k.shape[1]
        k, v = k.contiguous(), v.contiguous()
        ctx.layout, ctx.causal, ctx.scale = layout, causal, scale
        keys, values = k, v
        merged = None
        for step in range(layout.size):
            # The next keys travel while those at hand are used.
            coming = _pass_on((keys, values), layout, KEYS) if step + 1 < layout.size else None
            # Only a rank's own keys need a mask: of others' keys those are shown which all these queries see.
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
    def backward(ctx: FunctionContext, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        layout, causal, scale = ctx.layout, ctx.causal, ctx.scale
        kernel, groups, gradient = (
            kernel_for(q),
            q.shape[1] // k.shape[1],
            gradients[0].to(q.dtype).contiguous(),
        )
        exact = lse.dtype
        # Sums over the steps have the dtype of the log-sum-exps, at least fp32: bf16 would round each addend.
        dq = torch.zeros(q.shape, dtype=exact, device=q.device)
        own = [torch.zeros(t.shape, dtype=exact, device=q.device) for t in (k, v)]
        keys, values = k, v
        # The gradients of the keys at hand, from the ranks that had them before.
        travelling = None
        for step in range(layout.size):
            coming = _pass_on((keys, values), layout, KEYS) if step + 1 < layout.size else None
            seen, shown = _visible(layout, step, causal, q.shape[2])
            block = (q[:, :, seen], _repeat(keys[:, :, shown], groups), _repeat(values[:, :, shown], groups))
            part = kernel.backward(
                gradient[:, :, seen], block, (out[:, :, seen], lse[:, :, seen]), causal and step == 0, scale
            )
            dq[:, :, seen] += part[0]
            # Gradients of a rank's own keys stay here. Those of others follow their keys; each rank adds its part.
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
        # After the last step they have come round to the rank whose keys these are.
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
    # The keys come from an earlier rank.
    if step <= layout.rank:
        return everything, slice(0, head)
    return slice(head, length), everything


def _start(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    # Copies, because sums go into them, and what a kernel returned may be kept by activation checkpointing.
    return out.to(lse.dtype, copy=True), lse.clone()


def _merge(out: Tensor, lse: Tensor, rows: slice, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over two sets of keys from the softmax over each, in place.

    ``out`` [b, h, s, d] and ``lse`` [b, h, s] are of all queries; ``part`` and ``part_lse`` of those in ``rows``.
    """
    before = lse[:, :, rows]
    # Each part is a softmax over its own keys; exp(lse_part - lse_total) is the share of these keys in the whole.
    total = torch.logaddexp(before, part_lse)
    out[:, :, rows] *= (before - total).exp()[..., None]
    out[:, :, rows] += part * (part_lse - total).exp()[..., None]
    lse[:, :, rows] = total
    return out, lse


def _repeat(tensor: Tensor, groups: int) -> Tensor:
    """Repeat each key head for every query head that uses it."""
    return tensor.repeat_interleave(groups, dim=1) if groups > 1 else tensor


def _folded(gradient: Tensor, groups: int) -> Tensor:
    """Apply the adjoint of ``_repeat``: [b, h, t, d] to [b, h / groups, t, d]."""
    return gradient.unflatten(1, (-1, groups)).sum(2) if groups > 1 else gradient


# -- what travels --------------------------------------------------------------------------------------------


class _PendingReceive:
    """Tensors on their way from the rank before. Holds those that are being sent."""

    def __init__(self, tensors: list[Tensor], sent: Sequence[Tensor], works: list[dist.Work]) -> None:
        self._tensors, self._sent, self._works = tensors, sent, works

    def wait(self) -> list[Tensor]:
        with waiting_for_ranks():
            for work in self._works:
                work.wait()
        return self._tensors


def _pass_on(tensors: Sequence[Tensor], layout: SequenceLayout, tag: int) -> _PendingReceive:
    """Start to send to the next rank and to receive as much from the one before."""
    # Sends and receives name global ranks.
    ranks = dist.get_process_group_ranks(layout.group)
    after, before = ranks[(layout.rank + 1) % layout.size], ranks[layout.rank - 1]
    received = [torch.empty_like(tensor) for tensor in tensors]
    operations = []
    for number, (out, into) in enumerate(zip(tensors, received, strict=True), start=tag):
        operations.append(dist.P2POp(dist.isend, out, after, layout.group, tag=number))
        operations.append(dist.P2POp(dist.irecv, into, before, layout.group, tag=number))
    return _PendingReceive(received, tensors, dist.batch_isend_irecv(operations))


_HALF = (torch.float16, torch.bfloat16)


Three = tuple[Tensor, Tensor, Tensor]
"""q, k and v, or their gradients: [batch, heads, positions, head_dim], of one dtype."""
Merged = tuple[Tensor, Tensor]
"""Output, of the shape of q, and log-sum-exp [batch, heads, positions], float32 or more."""


class Kernel(Protocol):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Merged:
        """Output and log-sum-exp over these keys, of q, k and v as in ``Three``."""

    def backward(self, gradient: Tensor, qkv: Three, merged: Merged, causal: bool, scale: float) -> Three:
        """Gradients of q, k and v from that of the output, of its shape. ``merged`` is over all keys."""


def kernel_for(q: Tensor) -> Kernel:
    """Return the kernel for this device, dtype and head dimension; ``q`` is [batch, heads, positions, head_dim]."""
    if q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64, *_HALF):
        return CpuFlash()
    if q.device.type == "cuda" and q.dtype in _HALF and q.shape[-1] <= 256:
        return CudaFlash()
    if q.device.type == "cuda" and q.dtype is torch.float32 and q.shape[-1] % 4 == 0:
        return CudaEfficient()
    return Plain()


class CpuFlash:
    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Merged:
        out, lse = kernels.flash_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse

    def backward(self, gradient: Tensor, qkv: Three, merged: Merged, causal: bool, scale: float) -> Three:
        return kernels.flash_for_cpu_backward(gradient, *qkv, *merged, 0.0, causal, scale=scale)


class CudaFlash:
    """Head dimensions are filled up to a multiple of 8 with zeros, which change nothing, as torch itself does."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Merged:
        padded = [_fill(tensor, 8) for tensor in (q, k, v)]
        out, lse, *_ = kernels.flash(*padded, 0.0, causal, False, scale=scale)
        return out[..., : q.shape[-1]], lse

    def backward(self, gradient: Tensor, qkv: Three, merged: Merged, causal: bool, scale: float) -> Three:
        q, k, _ = qkv
        out, lse = merged
        # Without dropout the random state is not read; without nested tensors neither are cumulated lengths.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        gradients = kernels.flash_backward(
            _fill(gradient, 8),
            *(_fill(tensor, 8) for tensor in (*qkv, out)),
            lse.contiguous(),
            *(None, None, q.shape[2], k.shape[2], 0.0, causal, state, state[0]),
            scale=scale,
        )
        dq, dk, dv = (tensor[..., : q.shape[-1]] for tensor in gradients)
        return dq, dk, dv


class CudaEfficient:
    """Log-sum-exps of this kernel come in rows of a multiple of 32."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Merged:
        out, lse, *_ = kernels.efficient(q, k, v, None, True, 0.0, causal, scale=scale)
        return out, lse[..., : q.shape[2]]

    def backward(self, gradient: Tensor, qkv: Three, merged: Merged, causal: bool, scale: float) -> Three:
        out, lse = merged
        # Rows that are no queries: an infinite log-sum-exp makes their weights 0.
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
        state = torch.zeros((), dtype=torch.int64, device=out.device)
        needed = [True, True, True, False]
        dq, dk, dv, _ = kernels.efficient_backward(
            gradient, *qkv, None, out, lse, state, state, 0.0, needed, causal, scale=scale
        )
        return dq, dk, dv


class Plain:
    """Written out, for devices and dtypes that no kernel is known for: the scores [b, h, s, t] are in memory."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Merged:
        scores = self._scores(q, k, causal, scale)
        lse = scores.logsumexp(-1)
        return ((scores - lse[..., None]).exp() @ v.to(scores.dtype)).to(q.dtype), lse

    def backward(self, gradient: Tensor, qkv: Three, merged: Merged, causal: bool, scale: float) -> Three:
        dtype = qkv[0].dtype
        out, lse = merged
        # ``lse`` is over all keys, so that the weights are these keys' shares in the whole softmax.
        weights = (self._scores(qkv[0], qkv[1], causal, scale) - lse[..., None]).exp()
        q, k, v, gradient, out = (tensor.to(weights.dtype) for tensor in (*qkv, gradient, out))
        dv = weights.mT @ gradient
        # Over all keys, weights * (gradient @ v.mT) adds up to gradient * out: no other keys are needed.
        dscores = weights * (gradient @ v.mT - (gradient * out).sum(-1, keepdim=True))
        dq, dk = dscores @ k * scale, dscores.mT @ q * scale
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)

    def _scores(self, q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
        exact = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(exact) @ k.to(exact).mT * scale
        if not causal:
            return scores
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(hidden, float("-inf"))


def _fill(tensor: Tensor, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return F.pad(tensor, (0, missing)) if missing else tensor
