"""Parameters that a rank has not used in a step: a head for each kind of batch, experts chosen in Python.

torch concatenates the gradients of a group that exist on a rank and adds up what the ranks send, so that ranks with
other gradients would add those of one parameter to another's. Here a missing gradient counts as zeros, as in the mean
over all ranks. A parameter that no rank has used gets no gradient at all, so that no optimizer decays it or goes on
with its momentum, as in plain torch. No message tells the ranks which these are: the zeros are negative ones. A sum of
floating-point numbers is -0.0 only if every term of it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep.comm.dtensor import local
from lockstep.parallel.gradient_mean import is_negative_zero
from lockstep.torch_internals import fsdp2
from lockstep.torch_internals import fsdp2_backward as engine
from lockstep.torch_internals.fsdp2_forward import one_of_each_group
from lockstep.torch_internals.fsdp2_gathered import FSDPParam, FSDPParamGroup, ShardedModule


class UnusedParameters:
    """Belongs to one sharded model.

    Args:
        modules: Those that ``fully_shard`` was applied to.
        groups: torch's records of the parameters that are gathered together.
    """

    def __init__(self, modules: list[ShardedModule], groups: list[FSDPParamGroup]) -> None:
        # Without a gradient on this rank: they get none if the reduced one is negative zeros.
        self._missing: list[FSDPParam] = []
        self._is_backward = False
        self._passed: set[int] = set()
        for group in groups:
            engine.before_reduction(group, self._before_reduction_of(group))
        engine.keep_for_another_backward(groups)
        for module in one_of_each_group(modules):
            engine.after_reductions(module, self.remove_gradients)

    def backward_begins(self) -> None:
        """Reduce every group until ``backward_ends``, whether it was used on this rank or not."""
        self._is_backward = True

    def backward_ends(self) -> None:
        """Remove what is left, where torch has reduced outside of its own callback."""
        self._is_backward = False
        self.remove_gradients()

    def forget(self) -> None:
        """Forget a backward that raised."""
        self._missing.clear()
        self._passed.clear()

    def passed(self, module: ShardedModule) -> None:
        """Note that a module was passed through on this rank: other ranks wait for its gradients, which are zeros."""
        self._passed.update(map(id, fsdp2.param_groups(module)))

    def _before_reduction_of(self, group: FSDPParamGroup) -> Callable[[], None]:
        def fill() -> None:
            present, missing = engine.present_and_missing(group)
            if not (present or self._is_backward or id(group) in self._passed):
                # A pass such as that of torch.autograd.grad leaves no gradients.
                return
            if not missing:
                return
            # Sums inside a replica go on to the other replicas later: only then can it be said what nobody has used.
            if engine.reaches_shards(group):
                self._missing += [param for param in missing if fsdp2.sharded_param(param).grad is None]
            engine.set_negative_zero(missing, present)

        return fill

    @torch.no_grad()
    def remove_gradients(self) -> None:
        """Remove the gradients that no rank has computed."""
        self._passed.clear()
        shards = [fsdp2.sharded_param(param) for param in self._missing]
        self._missing.clear()
        reduced = [shard for shard in shards if shard.grad is not None]
        if reduced:
            # One reading for all, because on an accelerator it waits.
            unused = torch.stack([is_negative_zero(local(shard.grad)) for shard in reduced]).tolist()
            for shard, is_unused in zip(reduced, unused, strict=True):
                if is_unused:
                    shard.grad = None
