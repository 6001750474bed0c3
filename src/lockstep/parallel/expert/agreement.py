"""Do the ranks call the same layers? Before its counts each rank says which one it calls, or that its forward is over.

A rank that leaves a layer out would otherwise leave the others waiting, or meet them in another collective.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.collectives import all_gather_into_tensor
from lockstep.errors import CollectiveMismatchError
from lockstep.model.hook import UncopiedHook
from lockstep.torch_internals import compile as torch_compile


@dataclass(frozen=True, eq=False)
class Calls:
    """Of the layers ``names`` of one model; ``most``: the most counts that one of them sends."""

    group: dist.ProcessGroup
    names: tuple[str, ...]
    most: int

    def exchange(self, number: int, counts: torch.Tensor) -> torch.Tensor:
        """All ranks' counts, [R, *counts.shape]; this rank calls layer ``number``, or -1: its forward is over.

        Raises:
            CollectiveMismatchError: ranks call different layers; on all of them.
        """
        message = counts.new_zeros(1 + self.most)
        message[0] = number
        message[1 : 1 + counts.numel()] = counts.flatten()
        ranks = self.group.size()
        every = message.new_empty(ranks * len(message))
        all_gather_into_tensor(every, message, group=self.group)
        rows = every.view(ranks, -1)
        called = rows[:, 0].tolist()
        if len(set(called)) > 1:
            self._refuse(called)
        return rows[:, 1 : 1 + counts.numel()].reshape(ranks, *counts.shape)

    def __deepcopy__(self, memo: dict[int, object]) -> Calls:
        return self  # groups cannot be copied

    def _refuse(self, called: list[int]) -> None:
        other = next(rank for rank, number in enumerate(called) if number != called[0])
        said = [
            f"calls the mixture of experts '{self.names[called[rank]]}'"
            if called[rank] >= 0
            else "ends its forward"
            for rank in (0, other)
        ]
        raise CollectiveMismatchError(
            f"Rank 0 of the group {said[0]} while rank {other} {said[1]}, but the experts are spread over the ranks, "
            "which serve one another. Call the same layers in the same order on every rank, with no tokens (x[:0]) "
            "where a rank has none for one."
        )


class AfterForward(UncopiedHook):
    """A forward hook of the model around the layers: says that this rank's forward is over."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    @torch_compile.disable
    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        device = next(module.parameters()).device
        self.calls.exchange(-1, torch.zeros(0, dtype=torch.int64, device=device))
