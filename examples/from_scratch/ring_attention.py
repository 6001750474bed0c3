"""Ring attention: a sequence is spread over the processes, and keys and values go round.

    python examples/from_scratch/ring_attention.py

Each process has a chunk of the sequence: its queries, keys and values. Queries stay. In N - 1 hops every process sees
all keys and values, one chunk at a time. Attention over several chunks is merged exactly, by log-sum-exps.

Paper: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers for Near-Infinite Context, ICLR 2024.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ring_all_reduce import hop
from world import Check, count, run, same, wire


def scores_of(q: Tensor, k: Tensor, own: bool) -> Tensor:
    """[..., queries, keys].

    In a process's own chunk no position may see a later one.
    """
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return (
        scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf) if own else scores
    )


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys, from the attention over each.

    ``lse`` is the log of the sum of the exponentials of all scores. A part's share of the whole is exp(its lse) over
    the sum of both. logaddexp adds them without overflow.
    """
    total = torch.logaddexp(lse, part_lse)
    return out * (lse - total).exp() + part * (part_lse - total).exp(), total


class RingAttention(torch.autograd.Function):
    """Causal attention.

    All tensors are this process's chunk: [batch, heads, sequence / N, head width].
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        travelling = torch.stack([k, v])
        out, lse = torch.zeros_like(q), q.new_full((*q.shape[:-1], 1), -torch.inf)
        for step in range(size):
            owner = (rank - step) % size
            # Keys of later positions are passed on, but not looked at.
            if owner <= rank:
                keys, values = travelling
                scores = scores_of(q, keys, own=step == 0)
                out, lse = merge(out, lse, scores.softmax(-1) @ values, scores.logsumexp(-1, keepdim=True))
            if step < size - 1:
                travelling = hop(travelling)
        # Not the scores: they would be [sequence / N, sequence]. Backward computes them
        # again.
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        rank, size = dist.get_rank(), dist.get_world_size()
        scale = q.shape[-1] ** -0.5
        # The softmax's backward subtracts the mean gradient of a row, weighted by its
        # probabilities.
        mean = (gradient * out).sum(-1, keepdim=True)
        travelling, gradients = torch.stack([k, v]), torch.zeros_like(torch.stack([k, v]))
        q_gradient = torch.zeros_like(q)
        for step in range(size):
            if (rank - step) % size <= rank:
                keys, values = travelling
                weights = (scores_of(q, keys, own=step == 0) - lse).exp()
                score_gradient = weights * (gradient @ values.mT - mean) * scale
                q_gradient += score_gradient @ keys
                gradients = gradients + torch.stack([score_gradient.mT @ q, weights.mT @ gradient])
            if step < size - 1:
                travelling = hop(travelling)
            # The gradients travel with their keys. The last hop brings them home.
            gradients = hop(gradients)
        return q_gradient, *gradients


def demo(length: int = 64) -> list[Check]:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, length, 8, requires_grad=True) for _ in range(3)]
    weight = torch.randn(2, 4, length, 8)
    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    (expected * weight).sum().backward()

    def mine(tensor: Tensor) -> Tensor:
        return tensor.detach().chunk(size, dim=2)[rank]

    chunks = [mine(tensor).clone().requires_grad_() for tensor in whole]
    with wire() as forward:
        out = RingAttention.apply(*chunks)
    with wire() as backward:
        (out * mine(weight)).sum().backward()

    pair = 2 * chunks[0].nbytes
    return [
        same("outputs, beside one process", [out], [mine(expected)], within=1e-5),
        same("gradients", [c.grad for c in chunks], [mine(w.grad) for w in whole], within=1e-5),
        count("bytes sent in forward: N - 1 pairs", forward.bytes, (size - 1) * pair),
        count("bytes sent in backward: 2 N - 1 pairs", backward.bytes, (2 * size - 1) * pair),
    ]


if __name__ == "__main__":
    run(demo, processes=4)
