"""The step that is under way: what its micro-batches have told so far, on this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from lockstep.observe.measures.batches import BatchSize
from lockstep.observe.measures.late import LateNumbers, is_plain_number
from lockstep.observe.measures.step import StepMeasures


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


MOST_GROUPS = 8


class OpenStep:
    """Becomes a ``StepMeasures`` when it ends, with loss and norm as soon as they have come from the device.

    Attributes:
        loss: Of what was passed to ``backward``.
        gradient_norm: Of all gradients before clipping, 0-d.
        logged: Numbers among what the script logs.
    """

    def __init__(self) -> None:
        self.loss = StepLoss()
        self.gradient_norm: torch.Tensor | None = None
        self.logged: dict[str, float] = {}
        self._tokens: int | None = 0
        self._samples: int | None = 0
        self._losses = 0

    @property
    def samples(self) -> int | None:
        """Of all ranks; None: not known."""
        return self._samples or None

    @property
    def tokens(self) -> int | None:
        """Of this rank; None: not known."""
        return self._tokens or None

    def trains_on(self, batch: BatchSize) -> None:
        """A backward uses this micro-batch."""
        self._tokens = _sum(self._tokens, batch.tokens)
        self._samples = _sum(self._samples, batch.samples)

    def log(self, values: Mapping[str, object]) -> None:
        """Keep the numbers of these, where reading them waits for nothing."""
        for name, value in values.items():
            if isinstance(value, Real) or (is_plain_number(value) and value.device.type == "cpu"):  # type: ignore[attr-defined]
                self.logged[str(name)] = float(value)  # type: ignore[arg-type]

    def late_numbers(self) -> LateNumbers:
        """For ``settle``."""
        tensors = self.loss.tensors()
        self._losses = len(tensors)
        if self.gradient_norm is not None:
            tensors.append(self.gradient_norm)
        return LateNumbers(tensors)

    def settle(self, step: StepMeasures, late: LateNumbers, accumulates: bool) -> None:
        """Give ``step`` what has come late. ``accumulates``: losses of a step are averaged."""
        numbers, count = late.read(), self._losses
        step.loss = self.loss.of(numbers[:count], accumulates)
        if len(numbers) > count:
            step.gradient_norm = numbers[count]


def learning_rates(optimizers: Sequence[Any]) -> list[float] | None:
    """Of each group of parameters, of at most ``MOST_GROUPS``; None: none is a number that is at hand."""
    found: list[float] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, float | int) or (is_plain_number(rate) and rate.device.type == "cpu"):
                found.append(float(rate))
            if len(found) == MOST_GROUPS:
                return found
    return found or None


def _sum(known: int | None, more: int | None) -> int | None:
    return None if known is None or more is None else known + more
