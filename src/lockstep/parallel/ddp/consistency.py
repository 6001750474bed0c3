"""Replicas that should stay equal: what they step on is compared, and hooks of parameters may only look.

DDP averages what hooks have made of each rank's own gradient. Of one that clips, normalises or rounds that is not what
one process gets. Hooks of loggers on the main process change nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from lockstep.errors import UsageError
from lockstep.runtime.clock import waiting_for_ranks
from lockstep.torch_internals.tensors import (
    TENSOR,
    call_around_others,
    hooks_of_parameter,
    kinds_of_hooks,
    version,
)

TOLERANCE = 1e-6
"""Of the sum of magnitudes: more than steps in another order of rounding make, less than gradients of other data."""


@torch.no_grad()
def most_apart(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> int | None:
    """Return the number of the tensor that differs most between the ranks; None where all are equal. Collective."""
    # [tensors, 2]: sum, and sum of magnitudes
    found = torch.stack([torch.stack(_sums(one)) for one in tensors]).to(tensors[0].device)
    # The maximum of the negated sums is the negated minimum, so that one all-reduce gives both.
    both = torch.cat([found, -found]).nan_to_num()
    with waiting_for_ranks():
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    most, negated_least = both.chunk(2)
    off = (most + negated_least).amax(1) / most[:, 1].clamp_min(torch.finfo(torch.float64).tiny)
    worst = int(off.argmax())
    return None if off[worst] <= TOLERANCE else worst


def _sums(parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    return values.sum(dtype=torch.float64), values.abs().sum(dtype=torch.float64)


def guard_hooks(replica: TorchDDP, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse what other hooks of these parameters change, when they do."""
    for parameter in parameters:
        for kind in kinds_of_hooks(parameter):
            hooks = hooks_of_parameter(parameter, kind)
            if isinstance(hooks[0], _FirstHook) and hooks[-1] is hooks[0].after:
                continue
            guard = _FirstHook(replica, parameter, kind)
            call_around_others(parameter, kind, guard, guard.after, _OURS)


class _FirstHook:
    """The first hook of a parameter, with the last one: ``after``."""

    def __init__(self, replica: TorchDDP, parameter: nn.Parameter, kind: str) -> None:
        self.after = _LastHook(self)
        self._replica = weakref.ref(replica)
        self._parameter = weakref.ref(parameter)
        self._kind = kind
        self._seen: tuple[torch.Tensor | None, int] | None = None

    def __call__(self, given: torch.Tensor) -> None:
        self._seen = self._state(given)

    def check(self, given: torch.Tensor) -> None:
        """Raise UsageError unless the gradient is what it was before the hooks."""
        before, self._seen = self._seen, None
        replica = self._replica()
        if replica is None or before is None:
            return
        now = self._state(given)
        # A hook that changed it has returned another tensor, or written into this one.
        if now[0] is before[0] and now[1] == before[1]:
            return
        parameter = self._parameter()
        names = (name for name, p in replica.module.named_parameters() if p is parameter)
        raise UsageError(
            f"A hook by {self._kind} on '{next(names, 'a parameter')}' of {type(replica.module).__name__} changed this "
            "rank's own gradient, which parallel='ddp' averages only afterwards. Change gradients between "
            "accelerator.backward() and optimizer.step()."
        )

    def _state(self, given: torch.Tensor) -> tuple[torch.Tensor | None, int]:
        gradient = given if self._kind == TENSOR else given.grad
        return gradient, 0 if gradient is None else version(gradient)


class _LastHook:
    def __init__(self, before: _FirstHook) -> None:
        self._before = before

    def __call__(self, given: torch.Tensor) -> None:
        self._before.check(given)


_OURS = (_FirstHook, _LastHook)
