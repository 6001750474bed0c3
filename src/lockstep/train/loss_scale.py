"""The dynamic loss scale of fp16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lockstep.comm.dtensor import is_dtensor, local, max_over_shards
from lockstep.comm.tree import StateDict
from lockstep.config.handlers import GradScalerKwargs
from lockstep.errors import UsageError
from lockstep.torch_internals import optim as torch_optim


class _ShardScaler(torch_optim.HookedGradScaler):
    """A GradScaler for sharded gradients, beside whole ones and in host memory too.

    torch's own does not mix the first two, and does not wait for its copies of the scale to host memory.
    ``other_stages``: ranks with other parameters of the same models, which skip the same steps.
    """

    def __init__(
        self, device: str, other_stages: Callable[[], dist.ProcessGroup | None], **options: Any
    ) -> None:
        super().__init__(device, **options)
        self._other_stages = other_stages

    def __getstate__(self) -> StateDict:
        # Process groups belong to one run, which neither a copy nor a file should carry along.
        return {**super().__getstate__(), "_other_stages": _nobody}

    def unscale_gradients(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale the ranks' parts of gradients as torch does; what one rank finds infinite, all ranks have found."""
        gradients = [p.grad for p in _with_gradients(optimizer)]
        if not any(map(is_dtensor, gradients)):
            return self._everywhere(
                super().unscale_gradients(optimizer, inv_scale, found_inf, allow_fp16), found_inf
            )
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for part in map(local, gradients):
            by_device.setdefault(part.device, []).append(_with_gradient(part))
        found = found_inf
        for device, parts in by_device.items():
            # torch's function looks at nothing else of an optimizer.
            stand_in: Any = SimpleNamespace(param_groups=[{"params": parts}])
            here = super().unscale_gradients(
                stand_in, inv_scale.to(device), torch.zeros_like(found_inf, device=device), allow_fp16
            )
            found = torch.maximum(found, here[device].to(found.device))
        return self._everywhere({found.device: max_over_shards(found, gradients)}, found_inf)

    def _everywhere(
        self, found: dict[torch.device, torch.Tensor], none: torch.Tensor
    ) -> dict[torch.device, torch.Tensor]:
        """Return what was found here or on a rank with another stage."""
        group = self._other_stages()
        if group is None:
            return found
        # Ranks that have found none take part, too.
        largest = torch.stack([none, *(number.to(none.device) for number in found.values())]).amax(0)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        return {largest.device: largest}


class LossScaler:
    """The dynamic loss scale of fp16, shared by all optimizers of one ``Accelerator``.

    The scale is updated once for each round of steps: when every optimizer has stepped, or at the
    next backward if only some did. Gradients of the others, which still wait for their step, are
    then brought to the new scale, so that none is unscaled by another scale than its own.

    ``takes_others``: a script may replace ``scaler``, because each rank has whole gradients.

    Reference: Micikevicius et al., Mixed Precision Training, ICLR 2018; ``torch.amp.GradScaler``.
    """

    def __init__(
        self,
        device: torch.device,
        options: GradScalerKwargs,
        other_stages: Callable[[], dist.ProcessGroup | None] | None = None,
        takes_others: bool = True,
    ) -> None:
        self.takes_others = takes_others
        self.scaler: torch.amp.GradScaler = _ShardScaler(
            device.type, other_stages or _nobody, **options.to_dict()
        )
        self._optimizers: list[Optimizer] = []
        self._stepped: set[int] = set()
        self._unscaled: set[int] = set()

    def register(self, optimizer: Optimizer) -> None:
        self._optimizers.append(optimizer)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, 0-d, times the scale."""
        self.end_round()
        return self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide this optimizer's gradients by the scale, unless that is done already."""
        if id(optimizer) not in self._unscaled and _has_gradients(optimizer):
            self.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def unscale_owners(self, parameters: list[torch.Tensor]) -> None:
        """Unscale the optimizers that hold any of these parameters."""
        wanted = {id(parameter) for parameter in parameters}
        for optimizer in self._optimizers:
            if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"]):
                self.unscale(optimizer)

    def skip(self, optimizer: Optimizer) -> None:
        """Leave out this step for another reason than its gradients: the scale and its schedule stay."""
        self._unscaled.discard(id(optimizer))
        torch_optim.forget_unscaled(self.scaler, optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Step unless a gradient is infinite or NaN. An optimizer without gradients does nothing."""
        if not _has_gradients(optimizer):
            # As without a scaler, it has nothing to do but to run its hooks.
            optimizer.step()
            return
        if id(optimizer) in self._stepped:
            self.end_round()
        self.scaler.step(optimizer)
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            self.end_round()

    def state_dict(self) -> StateDict:
        """Return the scaler's state after the steps taken so far."""
        self.end_round()
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self._stepped.clear()
        self._unscaled.clear()
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state_dict)

    def clear(self) -> None:
        """Forget all optimizers; the scale stays."""
        self.end_round()
        self._optimizers.clear()

    def end_round(self) -> None:
        """Update the scale, if an optimizer has stepped."""
        if not self._stepped:
            return
        waiting = [o for o in self._optimizers if id(o) not in self._stepped and _has_gradients(o)]
        before = self._scale() if waiting and self.scaler.is_enabled() else None
        self.scaler.update()
        if before is not None:
            after = self._scale()
            done = {id(p) for o in self._optimizers if id(o) in self._stepped for p in _with_gradients(o)}
            for optimizer in waiting:
                # What was unscaled becomes scaled again: ``update`` has forgotten that it was.
                factor = after if id(optimizer) in self._unscaled else after / before
                gradients = [p.grad for p in _with_gradients(optimizer) if id(p) not in done]
                for gradient in gradients:
                    local(gradient).mul_(factor.to(gradient.device))
        self._stepped.clear()
        self._unscaled.clear()

    def _scale(self) -> torch.Tensor:
        """Return a copy of the scale, 0-d on the device: reading it as a number would wait for the device."""
        scale = torch_optim.scale_of(self.scaler)
        assert scale is not None
        return scale.clone()


def scale_by(scaler: torch.amp.GradScaler | None, owner: LossScaler | None) -> None:
    """Let ``owner`` scale losses by a script's own ``scaler``; None: by none.

    Raises:
        UsageError: nothing is scaled here, or ranks have parts of gradients, which need the scaler made for them.
    """
    scaler = scaler or torch.amp.GradScaler(enabled=False)
    if owner is not None and (scaler is owner.scaler or owner.takes_others):
        owner.end_round()
        owner.scaler = scaler
    elif owner is not None or scaler.is_enabled():
        raise UsageError(
            "scaler was set to another GradScaler, but losses are scaled by the script's own only with "
            "mixed_precision='fp16' and whole gradients (parallel='ddp'). Pass GradScalerKwargs to Accelerator instead."
        )


def _nobody() -> None:
    """There are no other stages."""


def _with_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Return a tensor with this gradient: what a scaler looks at of a parameter."""
    tensor = gradient.detach()
    tensor.grad = gradient
    return tensor


def _with_gradients(optimizer: Optimizer) -> Iterator[Any]:
    return (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


def _has_gradients(optimizer: Optimizer) -> bool:
    return next(_with_gradients(optimizer), None) is not None
