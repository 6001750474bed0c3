"""The loss of a step: of what a script passes to ``backward``, the number whose gradient the optimizer steps on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.observe.measures.late import is_plain_number


class StepLoss:
    """Of one window, on this rank.

    With ``gradient_accumulation_steps`` it is the mean of its micro-batches, and their weighted mean where each has a
    weight. Without, gradients of all backwards of a step are added up, and so are the losses: transformers' Trainer
    passes shares of one loss.
    """

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._weights: list[torch.Tensor | float | None] = []

    def add(self, loss: torch.Tensor, weight: torch.Tensor | float | None) -> None:
        """``loss``: 0-d, or of any shape with a ``weight`` that goes with it."""
        if is_plain_number(loss):
            self._losses.append(loss.detach())
            is_known = weight is None or isinstance(weight, (int, float)) or is_plain_number(weight)
            self._weights.append(weight if is_known else None)
        elif weight is not None and type(loss) is torch.Tensor:
            weights = torch.as_tensor(weight, device=loss.device).expand_as(loss)
            with torch.no_grad():
                total = weights.sum()
                self._losses.append((loss.detach() * weights).sum() / total)
                self._weights.append(total)

    def tensors(self) -> list[torch.Tensor]:
        """Numbers to be read when they have come, for ``of``."""
        return [*self._losses, *(weight for weight in self._weights if isinstance(weight, torch.Tensor))]

    def of(self, numbers: Sequence[float | None], accumulates: bool) -> float | None:
        """The loss by the numbers of ``tensors``; None: not all are known, or there was none."""
        if len(numbers) == 1:
            return numbers[0]
        read = iter(numbers)
        losses = [next(read) for _ in self._losses]
        weights = [next(read) if isinstance(weight, torch.Tensor) else weight for weight in self._weights]
        known = [loss for loss in losses if loss is not None]
        if not known or len(known) < len(losses):
            return None
        shares = [float(weight) for weight in weights if weight is not None]
        if len(shares) == len(known) and sum(shares) != 0:
            weighted = [loss * share for loss, share in zip(known, shares, strict=True)]
            return sum(weighted) / sum(shares)
        return sum(known) / (len(known) if accumulates else 1)
