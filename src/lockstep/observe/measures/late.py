"""Numbers of a device that are read when they have come, so that nobody waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class LateNumbers:
    """Copies of 0-d tensors on their way to the host.

    Of tensors on a CPU the numbers are there at once. On an accelerator with streams and events, such as CUDA, copies
    into pinned memory are enqueued behind what the tensors are computed by; on others the numbers stay unknown, as
    reading them would wait.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._numbers: list[torch.Tensor | None] = []
        self._copied: object = None
        for tensor in tensors:
            self._numbers.append(self._taken(tensor))
        module = None if self._copied is None else getattr(torch, self._copied, None)
        self._event: Any = None
        if module is not None:
            self._event = module.Event()
            self._event.record()

    def have_come(self) -> bool:
        """Whether ``read`` waits for nothing."""
        return self._event is None or bool(self._event.query())

    def read(self) -> list[float | None]:
        """The numbers in the order of the tensors; None: not known."""
        return [None if number is None else float(number) for number in self._numbers]

    def _taken(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not is_plain_number(tensor):
            return None
        if tensor.device.type == "cpu":
            return tensor.detach() if tensor.requires_grad else tensor
        if not hasattr(getattr(torch, tensor.device.type, None), "Event"):
            return None
        self._copied = tensor.device.type
        there = torch.empty((), dtype=tensor.dtype, pin_memory=True)
        there.copy_(tensor.detach(), non_blocking=True)
        return there


def is_plain_number(value: object) -> bool:
    """Whether it is a 0-d tensor of torch's own kind: of others, such as DTensors, reading may be collective."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.dim() == 0  # type: ignore[attr-defined]
