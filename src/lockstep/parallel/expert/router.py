"""Routing: which experts a token goes to, with which weights, and which rows travel between which ranks.

Everything about rows follows from the counts (R, k, E): of the tokens of rank r, how many chose expert e as their j-th.
Every rank has those of all ranks, so that nothing else needs to be agreed on before rows are sent.

References: Shazeer et al., Outrageously Large Neural Networks, ICLR 2017 (top-k gates); Lepikhin et al., GShard,
ICLR 2021; Fedus et al., Switch Transformers, JMLR 2022; Zoph et al., ST-MoE, 2022 (z-loss).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Routing:
    """The choices of T tokens among E experts, k each.

    - ``logits``, ``probabilities`` (T, E), float32.
    - ``gates`` (T, k), float32: what an expert's output is multiplied with.
    - ``experts`` (T, k), int64, the likeliest first. Of equally likely ones the lower number comes first.
    """

    logits: torch.Tensor
    probabilities: torch.Tensor
    gates: torch.Tensor
    experts: torch.Tensor


class Router(nn.Module):
    """A linear layer, a softmax and the ``top_k`` likeliest experts, in float32 under autocast too.

    Args:
        renormalize: Divide the gates by their sum over the k chosen experts.
    """

    def __init__(self, width: int, num_experts: int, top_k: int, renormalize: bool) -> None:
        super().__init__()
        self.top_k = top_k
        self.renormalize = renormalize
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, tokens: torch.Tensor) -> Routing:
        """Tokens (T, width) to the choices for each."""
        with torch.autocast(tokens.device.type, enabled=False):
            logits = F.linear(tokens.float(), self.weight.float())
            probabilities = logits.softmax(dim=-1)
        # Not topk, whose order of equal values may depend on how many tokens it sees.
        experts = probabilities.detach().sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        gates = probabilities.gather(1, experts)
        if self.renormalize:
            gates = gates / gates.sum(dim=-1, keepdim=True)
        return Routing(logits, probabilities, gates, experts)

    def extra_repr(self) -> str:
        num_experts, width = self.weight.shape
        return f"width={width}, num_experts={num_experts}, top_k={self.top_k}, renormalize={self.renormalize}"


def balance_loss(fractions: torch.Tensor, mean_probabilities: torch.Tensor) -> torch.Tensor:
    """Return the load-balance loss of GShard and Switch Transformers:

        L = E * sum over experts e of f_e * P_e

    f_e is the fraction of all choices that went to e, before any are dropped, and P_e the mean probability of e
    over all tokens; both (E,). It is 1 where all experts are equally loaded and E where one gets everything. Only
    P has a gradient. (Switch: k = 1. GShard has 1 / E in place of E, and counts first choices.)
    """
    return fractions.numel() * (fractions * mean_probabilities).sum()


def sum_of_squared_logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """Return the sum over tokens of (log sum_e exp logit_e)^2, of which the router z-loss is the mean; 0-d."""
    return logits.logsumexp(dim=-1).square().sum()


def count_choices(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count, for choices (T, k), how many tokens have each expert as their j-th: (k, E), int64."""
    top_k = experts.shape[1]
    return _choice_and_expert(experts, num_experts).bincount(minlength=top_k * num_experts).view(top_k, -1)


def capacity(counts: torch.Tensor, factor: float) -> torch.Tensor:
    """Return how many choices one expert takes: ceil(factor * k * T / E) for the T tokens of all ranks, 0-d int64."""
    # The counts of all ranks, choices and experts add up to k * T.
    return (counts.sum().double() * factor / counts.shape[-1]).ceil().long()


def within_capacity(counts: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Return how many of ``counts`` (R, k, E) are kept where an expert takes ``limit`` in all.

    All first choices come before all second ones (GShard), among these rank by rank, on a rank token by token.
    """
    ranks, top_k, num_experts = counts.shape
    # [k * R, E] in the order in which an expert takes them; ``before``: how many it has taken until then.
    in_order = counts.transpose(0, 1).reshape(top_k * ranks, num_experts)
    before = in_order.cumsum(0) - in_order
    kept = torch.minimum((limit - before).clamp_min(0), in_order)
    return kept.view(top_k, ranks, num_experts).transpose(0, 1)


def kept_slots(experts: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return the slots (token * k + choice) that are kept of choices (T, k), by expert and then by token: (n,), int64.

    ``kept`` (k, E): so many tokens keep this choice of this expert, the first ones.
    """
    top_k, num_experts = kept.shape
    key = _choice_and_expert(experts, num_experts)
    order = key.argsort(stable=True)
    sizes = key.bincount(minlength=kept.numel())
    first = sizes.cumsum(0) - sizes
    position = torch.empty_like(key)
    # Its place among the tokens that made the same choice of the same expert.
    position[order] = torch.arange(key.numel(), device=key.device) - first[key[order]]
    is_kept = (position < kept.flatten()[key]).view(top_k, -1).T.flatten()
    # Stable: rows of one expert stay in the order of their tokens.
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
    """Compute from ``rows`` (N, E) in host memory how many rows rank n has for expert e. Rank p has the p-th N-th of
    them."""
    ranks, num_experts = rows.shape
    # [from rank, to rank, expert of the latter]
    by_owner = rows.view(ranks, ranks, num_experts // ranks)
    mine = by_owner[:, rank]
    # Rows arrive rank by rank, from each sorted by expert.
    expert = torch.arange(mine.shape[1]).repeat(ranks).repeat_interleave(mine.flatten())
    return TokenTraffic(
        sent=by_owner[rank].sum(-1).tolist(),
        received=mine.sum(-1).tolist(),
        order=expert.argsort(stable=True),
        per_expert=mine.sum(0).tolist(),
    )
