"""What the ranks of a sharded model compare once, before its first step, and what that step must not do.

*Order of blocks*: weights are gathered block by block, so all ranks must call the same blocks in the same order.
Otherwise one rank's part of a block is joined with another rank's part of another one.

*Hooks of parameters* would see a rank's own gradient, or its part of the mean.

*Changes by hand* of weights while they are gathered: in a forward, before backward, or in a window. They are lost when
the weights are sharded again.

Later steps are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from lockstep.comm.dtensor import local
from lockstep.errors import UsageError
from lockstep.parallel.parameter_hooks import hooked
from lockstep.torch_internals import fsdp2
from lockstep.torch_internals.autograd import current_backward
from lockstep.torch_internals.fsdp2_backward import is_compiled
from lockstep.torch_internals.fsdp2_gathered import (
    FSDPParam,
    FSDPParamGroup,
    ShardedModule,
    watch_first_gathers,
)
from lockstep.torch_internals.tensors import bits_digest, kind_of_hook

MOST_GATHERS = 1000


class FirstStep:
    """Belongs to one sharded model.

    Args:
        modules: Those that ``fully_shard`` was applied to; the first is the model itself.
        groups: torch's records of the parameters that are gathered together.
        ranks: Those with replicas or shards of the parameters; None: all.
        keeps_shards: Nothing else steps on shards while their wholes are gathered.
        parallel: The line that asked for this, for messages.
    """

    def __init__(
        self,
        modules: list[ShardedModule],
        groups: list[FSDPParamGroup],
        ranks: dist.ProcessGroup | None,
        keeps_shards: bool,
        parallel: object,
    ) -> None:
        self._root = modules[0]
        self._ranks = ranks
        self._keeps_shards = keeps_shards
        self._parallel = parallel
        self._device = fsdp2.device_of(groups[0]) if groups else torch.device("cpu")
        # param -> digests of its whole and of its shard when it was gathered
        self._gathered: dict[FSDPParam, tuple[int, ...]] = {}
        self._changed: FSDPParam | None = None
        self._order = self._gathers = 0
        # Compiled code leaves the hook out, but on a rank that has given up compiling, as after many shapes, it runs.
        compiled = {part for m in self._root.modules() if is_compiled(m) for part in m.modules()}
        self._numbers = {module: number for number, module in enumerate(modules)}
        hooks = [m.register_forward_pre_hook(self.comes_to) for m in modules if m not in compiled]
        self._end: list[Callable[[], None]] = [hook.remove for hook in hooks]
        self._end += [
            watch_first_gathers(group, partial(self._note, group), partial(self._compare, group))
            for group in groups
        ]

    def end(self) -> None:
        """Look at nothing more."""
        for end in self._end:
            end()

    def forget(self) -> None:
        """Accept the changes of what is gathered now."""
        self._gathered.clear()

    def check(self) -> None:
        """Raise UsageError on all ranks before the first step, if one of them found something. Collective once."""
        for param in self._gathered:
            self._compare_one(param)
        self.end()
        hooks = ((name, kind_of_hook(p)) for name, p in self._root.named_parameters())
        found = next(((name, kind) for name, kind in hooks if kind is not None), None)
        order = self._order & 0x7FFFFFFF
        # The maximum of the negated numbers is the negated minimum.
        flags = [int(self._changed is not None), int(found is not None)]
        numbers = torch.tensor([order, -order, *flags], device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._ranks)
        most, negated_least, is_changed, is_hooked = numbers.tolist()
        kind = type(self._root).__name__.removeprefix("FSDP")
        if is_hooked:
            name, hook = found or ("A parameter", "register_hook")
            raise hooked(kind, name, hook, self._parallel)
        if is_changed:
            forms = () if self._changed is None else tuple(fsdp2.forms(self._changed))
            names = (n for n, p in self._root.named_parameters() if any(p is form for form in forms))
            changed = next(names, None)
            raise UsageError(
                f"{'A weight' if changed is None else repr(changed)} of {kind} was changed by the script in this "
                "step while it was gathered: in a forward, between forward and backward, or in an accumulation "
                "window. The change is lost. Change weights after optimizer.step(), before the next forward."
            )
        if most != -negated_least:
            raise UsageError(
                "In this step the ranks called different blocks of a sharded model, or called them in different "
                "orders, so parts of different weights were joined. Let all ranks call the same blocks in the "
                "order in which they stand in the model. A rank may leave some of them out."
            )

    def comes_to(self, module: ShardedModule, args: object = ()) -> None:
        """Note that a module is called, or passed through."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and current_backward() == -1:
            self._order = hash((self._order, self._numbers[module]))

    def _note(self, group: FSDPParamGroup) -> None:
        self._gathers += 1
        # A loop that steps by hand would be looked at for ever.
        if self._gathers <= MOST_GATHERS:
            self._gathered.update((param, self._digests(param)) for param in fsdp2.params(group))

    def _compare(self, group: FSDPParamGroup) -> None:
        for param in fsdp2.params(group):
            if fsdp2.is_unsharded(group) and param in self._gathered:
                self._compare_one(param)
        for param in fsdp2.params(group):
            self._gathered.pop(param, None)

    def _compare_one(self, param: FSDPParam) -> None:
        if self._digests(param) != self._gathered[param]:
            self._changed = param

    @torch.no_grad()
    def _digests(self, param: FSDPParam) -> tuple[int, ...]:
        tensors = (fsdp2.unsharded_param(param), fsdp2.sharded_param(param))[: 1 + self._keeps_shards]
        return tuple(bits_digest(local(tensor)) for tensor in tensors)
