"""Group relative policy optimisation: several answers to each prompt take the place of a value model.

Source of all formulas: Shao et al., DeepSeekMath, 2024. Tensors are [rows, answer length] if nothing else is said.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, group: int) -> Tensor:
    """(r - mean) / std of the rewards [rows] within each group of `group` answers to one prompt (section 4.1.2).

    Where all answers of a group are equally good there is nothing to learn from: 0.
    """
    by_group = rewards.view(-1, group)
    centred = by_group - by_group.mean(1, keepdim=True)
    return (centred / (by_group.std(1, keepdim=True) + 1e-4)).view(-1)


def kl_to_reference(logprobs: Tensor, reference: Tensor) -> Tensor:
    """p_ref / p - log(p_ref / p) - 1 of each token: without bias, and never negative (equation 4).

    It is the estimator k3 of Schulman, Approximating KL Divergence, 2020.
    """
    log_ratio = reference - logprobs
    return log_ratio.exp() - log_ratio - 1


def policy_loss(
    logprobs: Tensor, old: Tensor, reference: Tensor, advantages: Tensor, clip: float, kl_weight: float
) -> Tensor:
    """-min(rho A, clip(rho, 1 - clip, 1 + clip) A) + kl_weight KL of each token (equation 3).

    rho = p / p_old; the advantages are [rows], one of each answer.
    """
    ratio, advantage = (logprobs - old).exp(), advantages[:, None]
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return kl_weight * kl_to_reference(logprobs, reference) - objective


def token_weights(mask: Tensor) -> Tensor:
    """1 / |o| of each token: every answer counts the same, however long it is (equation 3)."""
    return mask / mask.sum(1, keepdim=True)
