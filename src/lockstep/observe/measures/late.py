"""Numbers of a device that are read when they have come, so that nobody waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

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
            self._event = module.Event()
            self._event.record()

    def have_come(self) -> bool:
        """Whether ``read`` waits for nothing."""
        return self._event is None or bool(self._event.query())

    def read(self) -> list[float | None]:
        """The numbers in their order; None: not known."""
        return [None if number is None else float(number) for number in self._numbers]

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not hasattr(getattr(torch, tensor.device.type, None), "Event"):
            return None
        self._copied = tensor.device.type
        there = torch.empty((), dtype=tensor.dtype, pin_memory=True)
        there.copy_(tensor.detach(), non_blocking=True)
        return there


def is_plain_number(value: object) -> bool:
    """Whether it is a 0-d tensor that can be read without a collective."""
    return type(value) in PLAIN and value.dim() == 0  # type: ignore[attr-defined]
