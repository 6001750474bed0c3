"""Attention of one block of queries to one block of keys, with the log-sum-exp that lets results be merged.

``q`` [b, h, s, d], ``k`` and ``v`` [b, h, t, d]; ``lse`` [b, h, s] is log Σ_j exp(scale q·k_j), in fp32. A backward
takes the output and log-sum-exp over *all* keys and gives the gradients that belong to the keys at hand.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.torch_internals import kernels

_HALF = (torch.float16, torch.bfloat16)


Three = tuple[Tensor, Tensor, Tensor]
"""q, k and v, or their gradients."""
Merged = tuple[Tensor, Tensor]
"""Output and log-sum-exp."""


class Kernel(Protocol):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Merged:
        """Output and log-sum-exp over these keys."""

    def backward(self, gradient: Tensor, qkv: Three, merged: Merged, causal: bool, scale: float) -> Three:
        """Gradients of q, k and v. ``merged`` is over all keys."""


def kernel_for(q: Tensor) -> Kernel:
    """The kernel for tensors of this device, dtype and head dimension."""
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
        gradients: Three = kernels.flash_for_cpu_backward(gradient, *qkv, *merged, 0.0, causal, scale=scale)
        return gradients


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
        weights = (self._scores(qkv[0], qkv[1], causal, scale) - lse[..., None]).exp()
        q, k, v, gradient, out = (tensor.to(weights.dtype) for tensor in (*qkv, gradient, out))
        dv = weights.mT @ gradient
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
