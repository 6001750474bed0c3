"""What ranks send each other in a round: gradients, and where each rank is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import reduce

import torch

from lockstep.errors import UsageError


class MessageWord(IntEnum):
    """What a rank says of itself."""

    RUNNING = 0
    ENDED = 1
    FAILED = 2


@dataclass(frozen=True)
class Total:
    """The sum of all ranks' messages of a round.

    ``gradients`` (n,) are the sums of all parameters' gradients, one after the other; ``present`` tells of each
    parameter whether some rank had one; ``words`` and ``staleness`` are what each rank said.
    """

    gradients: torch.Tensor
    present: list[bool]
    words: list[MessageWord]
    staleness: list[int]


class MessageFormat:
    """``[gradients | one number a parameter: is there a gradient | word of each rank | staleness of each rank]``

    Each rank fills its own places in the last two with numbers and the others' with zeros, so that one sum over the
    ranks brings everything together. Numbers are fp32, or what is wider among the parameters.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], rank: int, world_size: int, device: torch.device
    ) -> None:
        self.parameters = list(parameters)
        self.device = device
        self.dtype = reduce(torch.promote_types, (p.dtype for p in self.parameters), torch.float32)
        self._sizes = [p.numel() for p in self.parameters]
        self._rank = rank
        self._world_size = world_size

    def empty(self) -> torch.Tensor:
        """Memory for one message."""
        length = sum(self._sizes) + len(self._sizes) + 2 * self._world_size
        return torch.empty(length, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def pack(
        self, gradients: Sequence[torch.Tensor | None], word: MessageWord, staleness: int
    ) -> torch.Tensor:
        """This rank's message; the gradients are copied.

        Raises:
            UsageError: a gradient is sparse.
        """
        message = self.empty()
        parts = message.split([*self._sizes, len(self._sizes), self._world_size, self._world_size])
        for part, gradient in zip(parts, gradients, strict=False):
            if gradient is None:
                part.zero_()
            elif gradient.layout is not torch.strided:
                raise UsageError(
                    f"A gradient of shape {tuple(gradient.shape)} is sparse, but gradients that come late are sent "
                    "whole. Build the embedding with sparse=False."
                )
            else:
                part.copy_(gradient.reshape(-1))
        present, words, stale = parts[-3:]
        present.copy_(torch.tensor([float(gradient is not None) for gradient in gradients]))
        for places, number in ((words, int(word)), (stale, staleness)):
            places.zero_()
            places[self._rank] = number
        return message

    def nothing(self, word: MessageWord) -> torch.Tensor:
        """A message without gradients."""
        return self.pack([None] * len(self._sizes), word, 0)

    def read(self, total: torch.Tensor) -> Total:
        """The sum of all ranks' messages, taken apart; on an accelerator it must be ready."""
        elements = sum(self._sizes)
        numbers = total[elements:].tolist()
        tail = numbers[len(self._sizes) :]
        return Total(
            gradients=total[:elements],
            present=[number > 0 for number in numbers[: len(self._sizes)]],
            words=[MessageWord(int(number)) for number in tail[: self._world_size]],
            staleness=[int(number) for number in tail[self._world_size :]],
        )

    @torch.no_grad()
    def means(self, total: Total) -> list[torch.Tensor | None]:
        """The mean gradient of each parameter, in memory of its own; None where no rank had one."""
        mean = total.gradients / self._world_size
        return [
            part.view(parameter.shape).to(device=parameter.device, dtype=parameter.dtype) if there else None
            for part, parameter, there in zip(
                mean.split(self._sizes), self.parameters, total.present, strict=True
            )
        ]
