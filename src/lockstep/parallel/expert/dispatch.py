"""Arithmetic of dispatch: which choices an expert has room for, and which rows travel between which ranks.

Everything follows from the counts (R, k, E): of the tokens of rank r, how many chose expert e as their j-th. Every
rank has those of all ranks, so that nothing else needs to be agreed on before rows are sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def count_choices(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Of choices (T, k), how many tokens have each expert as their j-th: (k, E), int64."""
    top_k = experts.shape[1]
    return _choice_and_expert(experts, num_experts).bincount(minlength=top_k * num_experts).view(top_k, -1)


def capacity(counts: torch.Tensor, factor: float) -> torch.Tensor:
    """How many choices one expert takes: ceil(factor * k * T / E) for the T tokens of all ranks, 0-d int64."""
    return (counts.sum().double() * factor / counts.shape[-1]).ceil().long()


def within_capacity(counts: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """How many of ``counts`` (R, k, E) are kept where an expert takes ``limit`` in all.

    All first choices come before all second ones (GShard), among these rank by rank, on a rank token by token.
    """
    ranks, top_k, num_experts = counts.shape
    in_order = counts.transpose(0, 1).reshape(top_k * ranks, num_experts)
    before = in_order.cumsum(0) - in_order
    kept = torch.minimum((limit - before).clamp_min(0), in_order)
    return kept.view(top_k, ranks, num_experts).transpose(0, 1)


def kept_slots(experts: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The slots (token * k + choice) that are kept of choices (T, k), by expert and then by token: (n,), int64.

    ``kept`` (k, E): so many tokens keep this choice of this expert, the first ones.
    """
    top_k, num_experts = kept.shape
    key = _choice_and_expert(experts, num_experts)
    order = key.argsort(stable=True)
    sizes = key.bincount(minlength=kept.numel())
    first = sizes.cumsum(0) - sizes
    position = torch.empty_like(key)
    position[order] = torch.arange(key.numel(), device=key.device) - first[key[order]]
    is_kept = (position < kept.flatten()[key]).view(top_k, -1).T.flatten()
    by_expert = experts.flatten().argsort(stable=True)
    return by_expert[is_kept[by_expert]]


def _choice_and_expert(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """choice * E + expert for each of (T, k) choices, all first choices before all second ones: (k * T,)."""
    top_k = experts.shape[1]
    return (experts.T + num_experts * torch.arange(top_k, device=experts.device)[:, None]).flatten()


@dataclass(frozen=True)
class TokenTraffic:
    """What one rank of an expert-parallel group sends and receives.

    ``sent[p]`` rows go to rank p and ``received[p]`` come from it, sorted by expert. ``order`` (received rows,)
    lists these by expert, then by rank; each expert of this rank gets ``per_expert`` of them.
    """

    sent: list[int]
    received: list[int]
    order: torch.Tensor
    per_expert: list[int]


def traffic(rows: torch.Tensor, rank: int) -> TokenTraffic:
    """Of ``rows`` (N, E) in host memory: how many rows rank n has for expert e. Rank p has the p-th N-th of them."""
    ranks, num_experts = rows.shape
    by_owner = rows.view(ranks, ranks, num_experts // ranks)
    mine = by_owner[:, rank]
    expert = torch.arange(mine.shape[1]).repeat(ranks).repeat_interleave(mine.flatten())
    return TokenTraffic(
        sent=by_owner[rank].sum(-1).tolist(),
        received=mine.sum(-1).tolist(),
        order=expert.argsort(stable=True),
        per_expert=mine.sum(0).tolist(),
    )
