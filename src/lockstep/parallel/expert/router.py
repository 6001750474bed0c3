"""Which experts a token goes to, and with which weights.

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
    """The load-balance loss of GShard and Switch Transformers:

        L = E * sum over experts e of f_e * P_e

    f_e is the fraction of all choices that went to e, before any are dropped, and P_e the mean probability of e
    over all tokens; both (E,). It is 1 where all experts are equally loaded and E where one gets everything. Only
    P has a gradient. (Switch: k = 1. GShard has 1 / E in place of E, and counts first choices.)
    """
    return fractions.numel() * (fractions * mean_probabilities).sum()


def sum_of_squared_logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """What the router z-loss, mean over tokens of (log sum_e exp logit_e)^2, is the mean of; 0-d."""
    return logits.logsumexp(dim=-1).square().sum()
