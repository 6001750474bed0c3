"""Sharded parameters that some ranks use in a step and others do not: a head for each kind of batch, chosen experts.

torch concatenates the gradients of a group that exist on a rank and adds up what the ranks send, so that ranks with
other gradients add those of one parameter to another's. Here a missing gradient counts as zeros, as in the mean over
all ranks. Then one small reduction says which parameters no rank has used: these get no gradient at all, so that no
optimizer decays them or goes on with their momentum, as in plain torch.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import UsageError
from lockstep.parallel.zero.gathered_edits import ChangesByHand
from lockstep.torch_internals import fsdp2
from lockstep.torch_internals import fsdp2_backward as engine
from lockstep.torch_internals.autograd import current_backward as current_pass
from lockstep.torch_internals.fsdp2_gathered import FSDPParam, FSDPParamGroup

ORDER_BYTES = 4
"""Of a number that ranks share which called the same blocks in the same order."""


class UnusedParameters:
    """Belongs to one sharded model.

    Args:
        modules: Those that ``fully_shard`` was applied to.
        groups: torch's records of the parameters that are gathered together.
        ranks: Those with replicas or shards of the parameters; None: all.
        changes: Weights changed by hand, which the ranks compare with the same message.
    """

    def __init__(
        self, modules: list[Any], groups: list[Any], ranks: dist.ProcessGroup | None, changes: ChangesByHand
    ) -> None:
        self._modules = modules
        self._changes = changes
        self._ranks = ranks
        self._device = fsdp2.device_of(groups[0]) if groups else torch.device("cpu")
        params = [p for group in groups for p in fsdp2.params(group)]
        self._number = {id(p): number for number, p in enumerate(params)}
        self._number_of_shard = {id(fsdp2.sharded_param(p)): number for number, p in enumerate(params)}
        # Numbers of the parameters with a gradient here that has not reached the shards.
        self._used: set[int] = set()
        # Without a gradient here, nor at the shard from before: there the zeros are taken back if nobody has one.
        self._without: dict[int, object] = {}
        self._reached_shards = False
        self._is_backward = False
        self._passed: set[int] = set()
        self._order = 0
        for number, module in enumerate(modules):
            module.register_forward_pre_hook(partial(self._comes_to, number))
        for group in groups:
            engine.before_reduction(group, self._before_reduction_of(group))
        engine.keep_for_another_backward(groups)
        for module in modules:
            engine.after_reductions(module, self.settle)

    def backward_begins(self) -> None:
        """Until ``backward_ends`` every group is reduced, whether it was used on this rank or not."""
        self._is_backward = True

    def backward_ends(self) -> None:
        """Take back what is left, where torch has reduced outside of its own callback. Collective."""
        self._is_backward = False
        self.settle()

    def forget(self, shards: Collection[int] | None = None) -> None:
        """What was accumulated is gone; ``shards``: by ``id``, those whose gradients are; None: all."""
        gone = [self._number_of_shard[i] for i in shards or () if i in self._number_of_shard]
        for number in self._number_of_shard.values() if shards is None else gone:
            self._used.discard(number)
            self._without.pop(number, None)
        if shards is None:
            self._passed.clear()
            self._order = 0
        self._reached_shards = False

    def passed(self, module: Any) -> None:
        """This module was passed through on this rank: its gradients are zeros that other ranks wait for."""
        self._passed.update(map(id, fsdp2.param_groups(module)))
        self._comes_to(self._modules.index(module), module, ())

    def _comes_to(self, number: int, module: torch.nn.Module, args: object) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and current_pass() == -1:
            self._order = hash((self._order, number))

    def is_used(self, param: FSDPParam) -> bool:
        """Whether this rank has a gradient of it that has not reached the shards."""
        return self._number[id(param)] in self._used

    def are_used(self, params: list[object]) -> None:
        """Gradients of these were loaded."""
        self._used.update(self._number[id(param)] for param in params)

    def _before_reduction_of(self, group: FSDPParamGroup) -> Any:
        def fill() -> None:
            present = engine.present(group)
            self._used.update(self._number[id(param)] for param in present)
            if not (present or self._is_backward or id(group) in self._passed):
                return  # a pass such as torch.autograd.grad's, which leaves no gradients
            missing = engine.missing(group)
            self._reached_shards = self._reached_shards or (
                engine.reaches_shards(group) and bool(present or missing)
            )
            for param in missing:
                if fsdp2.sharded_param(param).grad is None:
                    self._without[self._number[id(param)]] = param
            engine.set_zero(missing, present)

        return fill

    @torch.no_grad()
    def settle(self) -> None:
        """Remove gradients that no rank has computed. Collective once they have reached the shards."""
        if not self._reached_shards:
            return
        order = (self._order & 0xFFFFFFFF).to_bytes(ORDER_BYTES, "little")
        shared = [*order, *self._changes.digest()]
        opposite = [255 - byte for byte in shared]
        flags = [int(number in self._used) for number in self._number.values()]
        message = torch.tensor([*flags, *shared, *opposite], dtype=torch.uint8, device=self._device)
        dist.all_reduce(message, dist.ReduceOp.MAX, group=self._ranks)
        used, most, least = message.split([len(flags), len(shared), len(shared)])
        is_read = message.device.type == "cpu" or self._changes.are_there  # an accelerator is waited for
        equal = (
            [a + b == 255 for a, b in zip(most.tolist(), least.tolist(), strict=True)] if is_read else [True]
        )
        if self._changes.are_there or not all(equal[ORDER_BYTES:]):
            try:
                self._changes.check(all(equal[ORDER_BYTES:]))
            except UsageError:
                self.forget()
                raise
        if not all(equal[:ORDER_BYTES]):
            self.forget()
            raise UsageError(
                "In this step the ranks called different blocks of a sharded model, or called them in different "
                "orders, so that parts of different weights were put together. Let all ranks call the same blocks in "
                "the same order, or each rank leave out some of them in the order in which they stand in the model."
            )
        without = self._without
        if without:  # only then are the numbers read, because on an accelerator reading waits for them
            for number, anywhere in enumerate(used.tolist()):
                if not anywhere and number in without:
                    fsdp2.sharded_param(without[number]).grad = None
        self.forget()
