"""Local SGD: each rank trains by itself, and now and then all take the mean of their parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from lockstep.parallel.asynchronous.averaging import average
from lockstep.parallel.asynchronous.block import Trainer
from lockstep.parallel.asynchronous.local_rounds import LocalRounds


class LocalSGD(LocalRounds):
    """Average parameters every ``local_sgd_steps`` optimizer steps, and at the end of the block; no gradients.

        with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
            for batch in loader:
                ...
                optimizer.step()
                local_sgd.step()

    Floating-point buffers are averaged too. The optimizer's state stays each rank's own.
    Reference: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019.

    Args:
        model: What ``prepare`` returned, replicated on every rank. All ranks must make the same number of steps.
        local_sgd_steps: Optimizer steps from one mean to the next. Batches inside an accumulation window do not
            count.
        enabled: False: gradients are averaged at each step, as without the block.
        optimizer: Only needed to go on exactly from a checkpoint; see ``state_dict``.

    Raises:
        ConfigError: ``local_sgd_steps`` is below 1.
        UsageError: the model is sharded, split, or not prepared. Both are raised on all ranks.
    """

    def __init__(
        self,
        accelerator: Trainer,
        model: nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,
        *,
        optimizer: Any = None,
    ) -> None:
        enabled = enabled and accelerator.runtime.world_size > 1
        super().__init__(accelerator, model, local_sgd_steps, optimizer, enabled)

    def _combine(self) -> None:
        average(self._communicator, self._trained.values())
