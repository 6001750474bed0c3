"""Losses of the weights themselves, as a penalty for their distance from others, against the same of whole weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from lockstep import Accelerator

WeightLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LOSSES: dict[str, WeightLoss] = {
    "mse": F.mse_loss,
    "mse summed": lambda weight, other: F.mse_loss(weight, other, reduction="sum"),
    "l1": F.l1_loss,
    "smooth l1": lambda weight, other: F.smooth_l1_loss(weight, other, beta=0.5),
    "huber": lambda weight, other: F.huber_loss(weight, other, delta=0.3),
    "soft margin": lambda weight, other: F.soft_margin_loss(weight, other + 1),
    "binary cross-entropy": lambda weight, other: F.binary_cross_entropy(weight.sigmoid(), other + 0.5),
    "of logits": F.binary_cross_entropy_with_logits,
}


def model() -> nn.Module:
    """Of 6 and of 5 rows, of which two ranks have as many and not as many."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5))


def penalty_and_gradients(
    loss_of: WeightLoss, net: nn.Module, backward: Callable[[torch.Tensor], None]
) -> list[torch.Tensor]:
    # Before the forward, in which the weights are gathered.
    terms = [loss_of(weight, torch.zeros_like(weight)) for weight in net.parameters()]
    loss = sum(terms[1:], terms[0])
    backward(loss + net(torch.ones(2, 4)).square().mean())
    return [loss.detach(), *(weight.grad for weight in net.parameters() if weight.grad is not None)]


def wrong(stage: int) -> list[str]:
    """The losses whose value or gradient is not that of the whole weights."""
    found = []
    for name, loss_of in LOSSES.items():
        expected = penalty_and_gradients(loss_of, model(), torch.Tensor.backward)
        accelerator = Accelerator(parallel=f"zero={stage}")
        seen = penalty_and_gradients(loss_of, accelerator.prepare(model()), accelerator.backward)
        whole = [getattr(one, "full_tensor", lambda one=one: one)() for one in seen]
        if len(whole) != len(expected) or not all(map(torch.allclose, whole, expected)):
            found.append(name)
    return found
