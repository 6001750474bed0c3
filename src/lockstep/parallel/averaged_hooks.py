"""Hooks that a user has set on parameters of a replica: they see what they see on one process, the ranks' average.

DDP averages what hooks have made of each rank's own gradient. Of a hook that multiplies that is the same; of one that
clips, normalises or rounds it is not. So a parameter with a hook is averaged first, by a hook before the user's, and
DDP's average of equal numbers changes nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import UsageError
from lockstep.torch_internals.parameter_hooks import call_before_others, hooks_of, kind_of_hook


def average_before_hooks(replica: Any, parameters: Iterable[nn.Parameter]) -> None:
    """Let hooks of these parameters of a DDP see averages.

    Raises:
        UsageError: a hook that is called after DDP has taken the gradient; or ranks may leave out parameters, and so
            the averages.
    """
    for parameter in parameters:
        kind = kind_of_hook(parameter)
        if kind is None or (kind == "register_hook" and _is_averaged(parameter, replica)):
            continue
        if kind == "register_hook" and not replica.find_unused_parameters:
            call_before_others(parameter, _Average(replica))
            continue
        name = next((name for name, p in replica.module.named_parameters() if p is parameter), "a parameter")
        raise UsageError(
            f"'{name}' of {type(replica.module).__name__} has a hook by {kind}, which "
            f"{'with find_unused_parameters=True ' if kind == 'register_hook' else ''}would see this rank's own "
            "gradient before parallel='ddp' averages it. Change gradients between accelerator.backward() and "
            "optimizer.step(), where they are averaged."
        )


def _is_averaged(parameter: nn.Parameter, replica: Any) -> bool:
    return any(isinstance(hook, _Average) and hook.belongs_to(replica) for hook in hooks_of(parameter))


class _Average:
    """A hook of a parameter. Collective, as long as there is the replica."""

    def __init__(self, replica: Any) -> None:
        self._replica = weakref.ref(replica)

    def belongs_to(self, replica: Any) -> bool:
        return self._replica() is replica

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        replica = self._replica()
        if replica is None:
            return gradient
        if gradient.requires_grad or gradient.layout is not torch.strided:
            kind = "one of create_graph=True" if gradient.requires_grad else "a sparse one"
            raise UsageError(
                f"A parameter of {type(replica.module).__name__} has a hook and its gradient is {kind}, which "
                "parallel='ddp' cannot average before the hook sees it. Remove the hook, and change gradients "
                "between accelerator.backward() and optimizer.step()."
            )
        mean = gradient.detach() / replica.process_group.size()
        dist.all_reduce(mean, group=replica.process_group)
        return mean
