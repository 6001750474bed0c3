"""Proximal policy optimisation. Tensors are [rows, answer length]; `mask` says which tokens the answers have."""

from __future__ import annotations

import torch
from torch import Tensor


def token_rewards(
    rewards: Tensor, logprobs: Tensor, reference: Tensor, mask: Tensor, kl_weight: float
) -> Tensor:
    """The reward of each token: -kl_weight (log p - log p_ref), and at an answer's last token the reward model's.

    `rewards` is [rows]. Source: Ziegler et al., Fine-Tuning Language Models from Human Preferences, 2019, equation 2;
    Ouyang et al., Training language models to follow instructions with human feedback, 2022, equation 2.
    """
    by_token = -kl_weight * (logprobs - reference) * mask
    last = mask.long().sum(1) - 1
    return by_token.scatter_add(1, last[:, None], rewards[:, None])


def advantages_and_returns(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, and advantage + value, which the value model learns.

        delta_t = r_t + gamma V_{t+1} - V_t          V is 0 after the last token
        A_t     = delta_t + gamma lam A_{t+1}

    Source: Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage Estimation, 2016,
    equations 12 and 16.
    """
    values = values * mask
    after = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    deltas = (rewards + gamma * after - values) * mask
    advantage, advantages = torch.zeros_like(deltas[:, 0]), []
    for delta in reversed(deltas.unbind(1)):
        advantage = delta + gamma * lam * advantage
        advantages.append(advantage)
    found = torch.stack(advantages[::-1], 1) * mask
    return found, found + values


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and variance 1 over the tokens of all rows: of all processes, because each has all rows.

    Source: Andrychowicz et al., What Matters In On-Policy Reinforcement Learning?, 2021 (choice C67, by batch).
    """
    known = x[mask]
    return torch.where(mask, (x - known.mean()) / (known.std(unbiased=False) + 1e-8), 0.0)


def policy_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """-min(rho A, clip(rho, 1 - clip, 1 + clip) A) of each token; rho = p / p_old.

    Source: Schulman et al., Proximal Policy Optimization Algorithms, 2017, equation 7.
    """
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 of each token.

    Source: the code of Schulman et al., 2017 (openai/baselines, ppo2); Engstrom et al., Implementation Matters in Deep
    Policy Gradients, 2020, section 3.
    """
    clipped = torch.clamp(values, old - clip, old + clip)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
