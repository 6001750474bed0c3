"""The dynamic loss scale of fp16."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from lockstep.config.handlers import GradScalerKwargs


class LossScaler:
    """The dynamic loss scale of fp16, shared by all optimizers of one ``Accelerator``.

    The scale is updated once for each round of steps: when every optimizer has stepped, or at the
    next backward if only some did. So no optimizer unscales gradients by another scale than the one
    that their loss was multiplied by.

    Reference: Micikevicius et al., Mixed Precision Training, ICLR 2018; ``torch.amp.GradScaler``.
    """

    def __init__(self, device: torch.device, options: GradScalerKwargs) -> None:
        self.scaler = torch.amp.GradScaler(device.type, **options.to_dict())
        self._optimizers: list[Optimizer] = []
        self._stepped: set[int] = set()
        self._unscaled: set[int] = set()

    def register(self, optimizer: Optimizer) -> None:
        self._optimizers.append(optimizer)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale."""
        self._update()
        return self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide this optimizer's gradients by the scale, unless that is done already."""
        if id(optimizer) not in self._unscaled and _has_gradients(optimizer):
            self.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def unscale_owners(self, parameters: list[torch.Tensor]) -> None:
        """``unscale`` the optimizers that hold any of these parameters."""
        wanted = {id(parameter) for parameter in parameters}
        for optimizer in self._optimizers:
            if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"]):
                self.unscale(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Step unless a gradient is infinite or NaN. An optimizer without gradients does nothing."""
        if not _has_gradients(optimizer):
            return
        if id(optimizer) in self._stepped:
            self._update()
        self.scaler.step(optimizer)
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            self._update()

    def _update(self) -> None:
        if self._stepped:
            self.scaler.update()
            self._stepped.clear()
            self._unscaled.clear()


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
