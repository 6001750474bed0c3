"""Replicas that should stay equal: their copies are compared, and hooks of parameters must not part them.

DDP averages what hooks have made of each rank's own gradient. Of a hook that multiplies that is the same as on one
process; of one that clips, normalises or rounds it is not. A parameter that has a hook on every rank when it is
prepared is therefore averaged first, by a hook before the user's: DDP's average of equal numbers changes nothing.
Other hooks may look, but not change: such are those of loggers on the main process.
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
    has_hook,
    hooks_of_parameter,
    kinds_of_hooks,
    version,
)

TOLERANCE = 1e-6
"""Of the sum of magnitudes: more than steps in another order of rounding make, less than gradients of other data."""


class CopiesAlike:
    """Compares the ranks' copies in the second forward, the third, fourth, sixth, tenth, and so on: ever more seldom.

    Averages keep them equal. Gradients and numbers that are a rank's own let them part: of a call of the bare module,
    of ``torch.autograd.grad``, of a hook or an optimizer that keeps what it has seen of the rank's rows.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._module = module
        self._group = group
        self._forwards = 0

    def before_forward(self, trained: list[nn.Parameter]) -> None:
        """Collective; all ranks call it as often.

        Raises:
            UsageError: copies differ. On all ranks alike.
        """
        self._forwards += 1
        last = self._forwards - 2
        # Zero or a power of two.
        if last >= 0 and last & (last - 1) == 0:
            self._compare(trained)

    @torch.no_grad()
    def _compare(self, trained: list[nn.Parameter]) -> None:
        if not trained:
            return
        apart = most_apart(trained, trained, self._module, self._group)
        if apart is None:
            return
        name, off = apart
        raise UsageError(
            f"'{name}' of {type(self._module).__name__} is no longer equal on all ranks: its sums differ by {off:.0e}. "
            "An optimizer step used gradients or numbers of one rank only. Call the model that accelerator.prepare() "
            "returned, not the module inside it, and compute losses from its outputs. If an optimizer or a hook uses "
            "numbers of this rank's rows, average them first: accelerator.reduce(tensor, 'mean')."
        )


def most_apart(
    tensors: Sequence[torch.Tensor],
    parameters: Sequence[nn.Parameter],
    module: nn.Module,
    group: dist.ProcessGroup,
) -> tuple[str, float] | None:
    """The parameter whose tensor differs most between the ranks, and how far; None where all are equal. Collective."""
    off = differences(tensors, group)
    worst = int(off.argmax())
    names = {id(p): name for name, p in module.named_parameters()}
    return None if off[worst] <= TOLERANCE else (names.get(id(parameters[worst]), "?"), off[worst].item())


def differences(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
    """For each tensor how far its sums on the ranks are apart, of the sum of its magnitudes. Collective."""
    # [tensors, 2]: sum, and sum of magnitudes
    found = torch.stack([torch.stack(_sums(one)) for one in tensors]).to(tensors[0].device)
    # The maximum of the negated sums is the negated minimum, so that one all-reduce gives both.
    both = torch.cat([found, -found]).nan_to_num()
    with waiting_for_ranks():
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    most, least = both.chunk(2)
    return (most + least).amax(1) / most[:, 1].clamp_min(torch.finfo(torch.float64).tiny)


def _sums(parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    return values.sum(dtype=torch.float64), values.abs().sum(dtype=torch.float64)


def average_before_hooks(replica: TorchDDP, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
    """Let hooks of ``register_hook`` that all ranks have see averages of these parameters. Collective."""
    if replica.find_unused_parameters or not parameters:
        # A rank may leave out a parameter, and with it the average.
        return
    have = torch.tensor([has_hook(p, TENSOR) for p in parameters], dtype=torch.uint8, device=device)
    # MIN: a hook that some ranks lack would leave the others waiting in its average.
    dist.all_reduce(have, dist.ReduceOp.MIN, group=replica.process_group)
    for parameter, is_everywhere in zip(parameters, have.tolist(), strict=True):
        if is_everywhere and not any(
            isinstance(hook, _AverageHook) for hook in hooks_of_parameter(parameter, TENSOR)
        ):
            call_around_others(parameter, TENSOR, _AverageHook(replica), None, _OURS)


def guard_hooks(replica: TorchDDP, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse what other hooks of these parameters change, when they do."""
    for parameter in parameters:
        for kind in kinds_of_hooks(parameter):
            hooks = hooks_of_parameter(parameter, kind)
            if isinstance(hooks[0], _AverageHook) or (
                isinstance(hooks[0], _FirstHook) and hooks[-1] is hooks[0].after
            ):
                continue
            guard = _FirstHook(replica, parameter, kind)
            call_around_others(parameter, kind, guard, guard.after, _OURS)


class _AverageHook:
    """A hook of a parameter. Collective, as long as there is the replica."""

    def __init__(self, replica: TorchDDP) -> None:
        self._replica = weakref.ref(replica)

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
            "rank's own gradient, which parallel='ddp' averages only afterwards. Set hooks by register_hook on every "
            "rank before accelerator.prepare(), without find_unused_parameters, where they see the average; or change "
            "gradients between accelerator.backward() and optimizer.step()."
        )

    def _state(self, given: torch.Tensor) -> tuple[torch.Tensor | None, int]:
        gradient = given if self._kind == TENSOR else given.grad
        return gradient, 0 if gradient is None else version(gradient)


class _LastHook:
    def __init__(self, before: _FirstHook) -> None:
        self._before = before

    def __call__(self, given: torch.Tensor) -> None:
        self._before.check(given)


_OURS = (_AverageHook, _FirstHook, _LastHook)
