"""Ulysses: all-to-alls give each rank the whole sequence for some of the heads, around the ordinary attention.

Reference: Jacobs et al., DeepSpeed Ulysses, 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.parallel.context.layout import SequenceLayout
from lockstep.runtime.clock import waiting_for_ranks
from lockstep.torch_internals.autograd import FunctionContext

SequenceExchange = Callable[[Tensor, SequenceLayout], Tensor]


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Compute ``scaled_dot_product_attention`` of this rank's queries to all ranks' keys.

    ``q`` [b, h, s, d], ``k`` and ``v`` [b, g, s, d] are this rank's contiguous chunk; N divides h, and g divides N
    or N divides g. ``mask`` is that of the whole sequence, [S, S] or with leading dims of b or 1 and h or 1.
    Four all-to-alls in forward, each of (N - 1) / N of this rank's part of q, k, v or the output.

    Raises:
        UsageError: heads that cannot be dealt out, or a mask of another shape.
    """
    k, v = _enough_heads(k, q.shape[1], layout.size), _enough_heads(v, q.shape[1], layout.size)
    q, k, v = (_SequenceAllToAll.apply(tensor, layout, _to_sequence, _to_heads) for tensor in (q, k, v))
    if mask is not None:
        options["attn_mask"] = _mask_of_heads(mask, q, layout)
    options["enable_gqa"] = k.shape[1] != q.shape[1]
    attended = F.scaled_dot_product_attention(q, k, v, **options)
    return _SequenceAllToAll.apply(attended, layout, _to_heads, _to_sequence)


def check_heads(heads: int, key_heads: int, size: int) -> None:
    """Raise UsageError if they cannot be dealt out to ``size`` ranks."""
    if heads % size:
        raise UsageError(
            f"cp_method=ulysses divides heads over ranks, but {heads} heads do not divide by cp = {size}. Use a "
            "cp that divides them, or cp_method=ring."
        )
    if key_heads % size and size % key_heads:
        raise UsageError(
            f"cp_method=ulysses divides heads over ranks, but {key_heads} key-value heads and cp = {size} do not "
            "divide each other. Use a cp that divides them, or cp_method=ring."
        )


def _enough_heads(tensor: Tensor, heads: int, size: int) -> Tensor:
    """Key heads that are fewer than the ranks are repeated, so that each rank has the one its queries use."""
    check_heads(heads, tensor.shape[1], size)
    return tensor.repeat_interleave(size // tensor.shape[1], dim=1) if tensor.shape[1] < size else tensor


def _mask_of_heads(mask: Tensor, q: Tensor, layout: SequenceLayout) -> Tensor:
    """Return the part of the mask for the heads of ``q`` [b, h / N, S, d] of this rank."""
    heads, length = q.shape[1], q.shape[2]
    if mask.ndim < 2 or mask.ndim > 4 or mask.shape[-1] != length or mask.shape[-2] not in (1, length):
        raise UsageError(
            f"The attention mask is {list(mask.shape)}, but the whole sequence has {length} positions. Make the mask "
            "of the whole sequence, [..., S, S], before the blocks, and pass it to them as an argument named 'mask'."
        )
    if mask.ndim < 3 or mask.shape[-3] == 1:
        return mask
    # Rank r has the heads from r h / N on.
    return mask.narrow(-3, layout.rank * heads, heads)


class _SequenceAllToAll(torch.autograd.Function):
    """``there(tensor, layout)``; its adjoint is the way ``back``."""

    @staticmethod
    def forward(
        ctx: FunctionContext,
        tensor: Tensor,
        layout: SequenceLayout,
        there: SequenceExchange,
        back: SequenceExchange,
    ) -> Tensor:
        ctx.layout, ctx.back = layout, back
        return there(tensor, layout)

    @staticmethod
    def backward(ctx: FunctionContext, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradients[0], ctx.layout), None, None, None


def _to_sequence(tensor: Tensor, layout: SequenceLayout) -> Tensor:
    """Exchange [b, h, s, d] of all heads and this rank's positions for [b, h / N, N s, d]."""
    # [b, h, s, d] -> [N (rank it goes to), b, h / N, s, d]
    sent = tensor.unflatten(1, (layout.size, -1)).movedim(1, 0)
    # [N (rank it came from), b, h / N, s, d]
    received = _exchange(sent, layout)
    # Chunks are contiguous, so that in the order of the ranks they are the whole sequence.
    return received.movedim(0, 2).flatten(2, 3)


def _to_heads(tensor: Tensor, layout: SequenceLayout) -> Tensor:
    """Invert ``_to_sequence``."""
    # [b, h / N, N s, d] -> [N, b, h / N, s, d]
    sent = tensor.unflatten(2, (layout.size, -1)).movedim(2, 0)
    return _exchange(sent, layout).movedim(0, 1).flatten(1, 2)


def _exchange(sent: Tensor, layout: SequenceLayout) -> Tensor:
    """Exchange [N, ...] by the rank it goes to for [N, ...] by the rank it came from."""
    sent = sent.contiguous()
    received = torch.empty_like(sent)
    with waiting_for_ranks():
        dist.all_to_all_single(received, sent, group=layout.group)
    return received
