"""Training on a rollout: the steps of PPO and GRPO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpo
import ppo
import torch
from models import Models
from options import Options
from rollout import Rollout, logprobs_of, row_generator, shares, values_of
from torch import Tensor, nn

from lockstep import Accelerator

LossOf = Callable[[Tensor], tuple[Tensor, Tensor]]  # rows -> losses and weights [rows, answer length]


def losses_of(models: Models, rollout: Rollout, options: Options) -> tuple[LossOf, LossOf | None]:
    """The losses of the policy and of the value model, as functions of rows."""
    device, mask = models.accelerator.device, rollout.is_answer

    def on(tensor: Tensor, rows: Tensor) -> Tensor:
        return tensor[rows].to(device)

    def new_logprobs(rows: Tensor) -> Tensor:
        return logprobs_of(models.policy, rollout, rows, device, options.temperature)

    if options.algorithm == "grpo":
        by_row, weights = grpo.group_advantages(rollout.rewards, options.group), grpo.token_weights(mask)

        def grpo_loss(rows: Tensor) -> tuple[Tensor, Tensor]:
            given = (on(tensor, rows) for tensor in (rollout.logprobs, rollout.reference, by_row))
            losses = grpo.policy_loss(new_logprobs(rows), *given, options.clip, options.kl_weight)
            return losses, on(weights, rows)

        return grpo_loss, None

    by_token = ppo.token_rewards(
        rollout.rewards, rollout.logprobs, rollout.reference, mask, options.kl_weight
    )
    advantages, returns = ppo.advantages_and_returns(
        by_token, rollout.values, mask, options.gamma, options.lam
    )
    advantages = ppo.whiten(advantages, mask)

    def policy_loss(rows: Tensor) -> tuple[Tensor, Tensor]:
        given = on(rollout.logprobs, rows), on(advantages, rows)
        losses = ppo.policy_loss(new_logprobs(rows), *given, options.clip)
        return losses, on(mask, rows).float()

    def value_loss(rows: Tensor) -> tuple[Tensor, Tensor]:
        given = on(rollout.values, rows), on(returns, rows)
        losses = ppo.value_loss(values_of(models.value, rollout, rows, device), *given, options.clip)
        return losses, on(mask, rows).float()

    return policy_loss, value_loss


def step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    rows: Tensor,
    loss_of: LossOf,
    options: Options,
) -> float:
    """One optimizer step on these rows of all processes; the loss is the weighted mean over all of them."""
    micro_batches = list(shares(rows, accelerator, options.micro_batch))
    accelerator.gradient_accumulation_steps = len(micro_batches)
    total = torch.zeros(2, device=accelerator.device)
    for own, counts in micro_batches:
        with accelerator.accumulate(model):
            losses, weights = loss_of(own)
            weights = weights * counts[:, None].to(weights)
            accelerator.backward(losses, weight=weights)
            accelerator.clip_grad_norm_(model.parameters(), options.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            total += torch.stack([(losses.detach() * weights).sum(), weights.sum()])
    weighted, weight = accelerator.reduce(total, "sum").tolist()
    return weighted / weight


def train_epoch(
    models: Models, rollout: Rollout, options: Options, iteration: int, epoch: int
) -> dict[str, float]:
    """Train once on the rollout. The order of rows is the same for any number of processes."""
    policy_loss, value_loss = losses_of(models, rollout, options)
    count = len(rollout.rewards)
    order = torch.randperm(count, generator=row_generator(options.seed, iteration, -1 - epoch))
    policy, value = [], []
    for rows in order.split(count // options.minibatches):
        policy.append(step(models.accelerator, models.policy, models.optimizer, rows, policy_loss, options))
        if value_loss is not None and models.value_accelerator is not None and models.value is not None:
            trained = models.value_accelerator, models.value, models.value_optimizer
            value.append(step(*trained, rows, value_loss, options))
    found = {"policy loss": sum(policy) / len(policy)}
    return found | ({"value loss": sum(value) / len(value)} if value else {})
