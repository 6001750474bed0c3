"""The step that is under way: what its micro-batches have told so far, on this rank.

Numbers of a device are read when they have come, so that nobody waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from lockstep.observe.measures.step import StepMeasures

MOST_GROUPS = 8


class OpenStep:
    """Becomes a ``StepMeasures`` when it has ended, with loss and norm as soon as they have come from the device.

    With ``gradient_accumulation_steps`` its loss is the mean of its micro-batches, and their weighted mean where each
    has a weight. Without, gradients of all backwards of a step are added up, and so are the losses: transformers'
    Trainer passes shares of one loss.

    Attributes:
        tokens: Of this rank; None: not known.
        samples: Of all ranks; None: not known.
        logged: Numbers among what the script logs.
        norm: Of all gradients before clipping, 0-d.
        is_on_device: Some of its numbers have to come from a device.
    """

    def __init__(self) -> None:
        self.tokens: int | None = 0
        self.samples: int | None = 0
        self.logged: dict[str, float] = {}
        self.is_on_device = False
        self.norm: torch.Tensor | None = None
        self._losses: list[Number | None] = []
        self._weights: list[Number | None] = []
        self._late: LateNumbers | None = None

    def add_loss(self, loss: torch.Tensor, weight: torch.Tensor | float | None) -> None:
        """Add what is passed to ``backward``: 0-d, or of any shape with a ``weight`` that goes with it."""
        number = self._taken(loss)
        if number is not None:
            self._losses.append(number)
            self._weights.append(self._taken(weight) if isinstance(weight, torch.Tensor) else weight)
        elif weight is not None and type(loss) is torch.Tensor:
            # Of an unreduced loss its weighted mean, which counts in the step with the sum of the weights.
            weights = torch.as_tensor(weight, device=loss.device).expand_as(loss)
            with torch.no_grad():
                total = weights.sum()
                self._losses.append(self._taken((loss.detach() * weights).sum() / total))
                self._weights.append(self._taken(total))

    def trains_on(self, tokens: int | None, samples: int | None) -> None:
        """Count a micro-batch that a backward uses."""
        self.tokens = None if self.tokens is None or tokens is None else self.tokens + tokens
        self.samples = None if self.samples is None or samples is None else self.samples + samples

    def log(self, values: Mapping[str, object]) -> None:
        """Keep the numbers of these, where reading them waits for nothing."""
        for name, value in values.items():
            if isinstance(value, Real) or (is_plain_number(value) and value.device.type == "cpu"):  # type: ignore[attr-defined]
                self.logged[str(name)] = float(value)  # type: ignore[arg-type]

    def send_numbers(self) -> None:
        """End the step: have those of its numbers that are on a device copied to the host."""
        self._late = LateNumbers(self._numbers())

    def have_come(self) -> bool:
        """Return whether ``settle`` waits for nothing."""
        return self._late is None or self._late.have_come()

    def write_into(self, step: StepMeasures, accumulates: bool) -> None:
        """Give ``step`` what has come late. ``accumulates``: losses of a step are averaged."""
        numbers: Sequence[Any] = self._numbers() if self._late is None else self._late.read()
        count = len(self._losses)
        step.loss = loss_of_step(numbers[:count], numbers[count:-1], accumulates)
        step.gradient_norm = None if numbers[-1] is None else float(numbers[-1])

    def _numbers(self) -> list[Number | None]:
        norm = self.norm if is_plain_number(self.norm) else None
        return [*self._losses, *self._weights, norm]

    def _taken(self, value: torch.Tensor) -> Number | None:
        """Return a number that is at hand, otherwise the tensor that will be read; None: it is no such tensor."""
        if type(value) not in PLAIN or value.dim() or value.is_complex():
            return None
        if value.is_cpu:
            return value.item()
        self.is_on_device = True
        return value.detach()


def loss_of_step(
    losses: Sequence[float | None], weights: Sequence[float | None], accumulates: bool
) -> float | None:
    """Return the loss of a step by those of its micro-batches; None: not all are known, or there was none."""
    known = [loss for loss in losses if loss is not None]
    if not known or len(known) < len(losses):
        return None
    if len(known) == 1:
        return known[0]
    shares = [weight for weight in weights if weight is not None]
    if len(shares) == len(known) and sum(shares) != 0:
        weighted = [loss * share for loss, share in zip(known, shares, strict=True)]
        return sum(weighted) / sum(shares)
    return sum(known) / (len(known) if accumulates else 1)


def learning_rates(optimizers: Sequence[Any]) -> list[float] | None:
    """Return the learning rate of each group of parameters, at most ``MOST_GROUPS``; None: none is a number that is at
    hand."""
    found: list[float] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, float | int) or (is_plain_number(rate) and rate.device.type == "cpu"):
                found.append(float(rate))
            if len(found) == MOST_GROUPS:
                return found
    return found or None


# Numbers that come late -------------------------------------------------------------------------------

Number = float | torch.Tensor
"""At hand, or on a device (0-d)."""

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Torch's own kinds: of others, such as DTensors, reading a number may be collective."""


class LateNumbers:
    """Copies of 0-d tensors on their way to the host; numbers among them are at hand.

    On an accelerator with streams and events, such as CUDA, copies into pinned memory are enqueued behind what the
    tensors are computed by; on others the numbers stay unknown, as reading them would wait.
    """

    def __init__(self, numbers: Sequence[Number | None]) -> None:
        self._copied: object = None
        self._numbers = [self._sent(one) if isinstance(one, torch.Tensor) else one for one in numbers]
        module = None if self._copied is None else getattr(torch, self._copied, None)
        self._event: Any = None
        if module is not None:
            # One event behind all copies tells of them all.
            self._event = module.Event()
            self._event.record()

    def have_come(self) -> bool:
        """Return whether ``read`` waits for nothing."""
        return self._event is None or bool(self._event.query())

    def read(self) -> list[float | None]:
        """Return the numbers in their order; None: not known."""
        return [None if number is None else float(number) for number in self._numbers]

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not hasattr(getattr(torch, tensor.device.type, None), "Event"):
            return None
        self._copied = tensor.device.type
        there = torch.empty((), dtype=tensor.dtype, pin_memory=True)
        there.copy_(tensor.detach(), non_blocking=True)
        return there


def is_plain_number(value: object) -> bool:
    """Return whether it is a 0-d tensor that can be read without a collective."""
    return type(value) in PLAIN and value.dim() == 0  # type: ignore[attr-defined]
