"""``fully_shard``'s whole parameters while they stand in the module, and what a script reads and sets there.

A ``param`` is torch's ``FSDPParam``, a ``group`` its ``FSDPParamGroup``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.torch_internals.autograd import is_in_backward
from lockstep.torch_internals.compile import is_tracing
from lockstep.torch_internals.versions import expect, probed

GRAD: Any = torch.Tensor.grad
"""torch's own attribute, behind that of ``GatheredParameter``."""

FSDPParam: TypeAlias = Any
"""Torch's private record of one sharded parameter, whose attributes differ between versions."""
FSDPParamGroup: TypeAlias = Any
"""That of parameters that are gathered together."""
ShardedModule: TypeAlias = Any
"""A module of which torch has made an ``FSDPModule``, too: Python has no name for a type that is both."""


class GatheredParameter(nn.Parameter):
    """A whole parameter, in the module between forward and the end of backward or of a window.

    Its ``grad`` is the shard's, where that has been reduced already: of a window's earlier micro-batches.
    """

    _record: tuple[FSDPParamGroup, FSDPParam] | None = None

    @property
    def grad(self) -> torch.Tensor | None:
        own: torch.Tensor | None = GRAD.__get__(self)
        # torch reads ``grad`` itself in backward, and must see its own.
        if own is not None or self._record is None or is_in_backward() or is_tracing():
            return own
        group, param = self._record
        if getattr(group, "_partial_reduce_output", None) is not None:
            raise UsageError(
                "Inside an accumulation window each gradient of a sharded model with replicas is a sum over "
                "some of the ranks, so p.grad does not have it yet. Read and change gradients where "
                "accelerator.sync_gradients is true."
            )
        reduced: torch.Tensor | None = param.sharded_param.grad
        return reduced

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self._record is not None and not is_in_backward():
            shard = self._record[1].sharded_param
            if value is None:
                shard.grad = None
            elif hasattr(value, "placements"):
                shard.grad = value
                return
            elif shard.grad is not None:
                raise UsageError(
                    f"p.grad of a sharded parameter of shape {tuple(shard.shape)} was set to a plain tensor inside "
                    "an accumulation window, where it is a shard of the averaged gradient. Change it in place "
                    "(p.grad.mul_(2)), or where accelerator.sync_gradients is true."
                )
        GRAD.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, nn.Parameter]) -> nn.Parameter:
        """Copy it as a parameter of its own."""
        if id(self) not in memo:
            whole = self.data.clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(whole, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: object) -> str | tuple[object, ...]:
        """Pickle it as a plain parameter."""
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


def set_own_grad(tensor: object, gradient: torch.Tensor | None) -> None:
    """Set the gradient at this very tensor."""
    GRAD.__set__(tensor, gradient)


def _become_gathered(group: FSDPParamGroup) -> None:
    """Let the plain whole parameters of a group be ``GatheredParameter``: the same objects, of which autograd knows.

    Relies on: ``_unsharded_param`` is made once, a plain parameter unless tensor parallelism has split it.
    """
    for param in group.fsdp_params:
        whole = param._unsharded_param
        if type(whole) is nn.Parameter:
            # Its class is changed in place, because autograd, hooks and the module refer to this very object.
            whole.__class__ = GatheredParameter
            vars(whole)["_record"] = (group, param)


def watch_first_gathers(
    group: FSDPParamGroup, gathered: Callable[[], None], dropped: Callable[[], None]
) -> Callable[[], None]:
    """Call ``gathered`` after and ``dropped`` before the whole parameters of a group stand in the module.

    Returns what ends the calls. Only the first gather of a group is waited for longer, if it has not come by then.

    Relies on: all callers look ``_to_unsharded``, ``_to_sharded`` and ``_to_sharded_post_forward`` up at the group;
    they do nothing where the group is so already.
    """
    is_watched = True
    to_unsharded, to_sharded = group._to_unsharded, group._to_sharded
    to_sharded_post_forward = group._to_sharded_post_forward

    def gather() -> None:
        # torch calls it also where the weights are gathered already.
        is_new = not group.is_unsharded
        to_unsharded()
        if is_new:
            _become_gathered(group)
            gathered()
            if not is_watched:
                del group._to_unsharded

    def drop() -> None:
        dropped()
        to_sharded()

    def drop_after_forward() -> None:
        dropped()
        to_sharded_post_forward()

    def end() -> None:
        nonlocal is_watched
        is_watched = False
        del group._to_sharded, group._to_sharded_post_forward
        if hasattr(group.fsdp_params[0], "_unsharded_param"):
            del group._to_unsharded

    group._to_unsharded, group._to_sharded = gather, drop
    group._to_sharded_post_forward = drop_after_forward
    return end


@probed("Tensor", "lets parameters be of a subclass")
def probe() -> None:
    """Train a parameter that has become a ``GatheredParameter``."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.__class__ = GatheredParameter
    expect(isinstance(parameter, nn.Parameter) and parameter.is_leaf, "a parameter of a subclass")
    (parameter * 3).sum().backward()
    found = parameter.grad
    expect(found is not None and found.tolist() == [3.0, 3.0], "the gradient of a subclass")
