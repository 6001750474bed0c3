"""The feed-forward networks of a mixture of experts, stacked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.comm.dtensor import is_dtensor
from lockstep.parallel.expert.collectives import ScaledGradient

Activation = Callable[[torch.Tensor], torch.Tensor]


class Experts(nn.Module):
    """E feed-forward networks of one shape, activation(x W_in^T + b_in) W_out^T + b_out, their weights stacked.

    Parameters: ``weight_in`` (E, hidden, width), ``weight_out`` (E, width, hidden), and with ``bias`` ``bias_in``
    (E, hidden), ``bias_out`` (E, width). They may be DTensors that are sharded on dim 0: a rank then applies its own.
    """

    gradient_factor: float = 1.0
    """What the gradients of the stacked parameters are multiplied with."""

    def __init__(self, width: int, hidden: int, num_experts: int, activation: Activation, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.weight_in = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.weight_out = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.bias_in = nn.Parameter(torch.empty(num_experts, hidden)) if bias else None
        self.bias_out = nn.Parameter(torch.empty(num_experts, width)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As of ``nn.Linear``: uniform within 1 / sqrt(inputs)."""
        for weight, bias in ((self.weight_in, self.bias_in), (self.weight_out, self.bias_out)):
            bound = 1 / math.sqrt(weight.shape[2])
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def forward(self, rows: torch.Tensor, per_expert: list[int]) -> torch.Tensor:
        """Rows (n, width), sorted by expert, ``per_expert`` for each of those held here."""
        # An expert without rows takes part too: its gradients are zeros, and all ranks have the same graph.
        weights = zip(
            rows.split(per_expert),
            self._held(self.weight_in),
            self._held_or_none(self.bias_in),
            self._held(self.weight_out),
            self._held_or_none(self.bias_out),
            strict=True,
        )
        return torch.cat(
            [
                F.linear(self.activation(F.linear(part, weight_in, bias_in)), weight_out, bias_out)
                for part, weight_in, bias_in, weight_out, bias_out in weights
            ]
        )

    def _held(self, stacked: nn.Parameter) -> tuple[torch.Tensor, ...]:
        """Of each expert that this rank holds."""
        held: Any = stacked
        if is_dtensor(stacked):
            held = held.to_local()
        if self.gradient_factor != 1:
            held = ScaledGradient.apply(held, self.gradient_factor)
        return tuple(held.unbind())  # not [index], whose gradients would each be as large as all

    def _held_or_none(self, stacked: nn.Parameter | None) -> tuple[torch.Tensor | None, ...]:
        return (None,) * len(self._held(self.weight_in)) if stacked is None else self._held(stacked)

    def extra_repr(self) -> str:
        num_experts, hidden, width = self.weight_in.shape
        return f"num_experts={num_experts}, width={width}, hidden={hidden}, bias={self.bias_in is not None}"
