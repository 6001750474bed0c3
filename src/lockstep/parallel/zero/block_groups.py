"""Forwards of neighbouring blocks whose weights are gathered together.

torch's own hooks of such modules end their forward when all have run, and gather for backward only when backward comes
to the one that ran last. So a block that is left out or called twice would keep weights gathered, and a backward
that does not come to the last one would compute without weights. Here:

- *Forward* of a group begins with the first call of any of its blocks. It ends after the block that stands last, when a
  block of another group is called, or with the forward of the model. A later call begins another one.
- *Backward* gathers the weights when it comes to the output of any of its blocks.

So blocks may be left out, repeated and called in any order, as where each is a group of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lockstep.comm.tree import Args, Kwargs
from lockstep.torch_internals import fsdp2, fsdp2_forward
from lockstep.torch_internals.autograd import current_backward as current_pass
from lockstep.torch_internals.compile import disable
from lockstep.torch_internals.fsdp2_backward import call_empty
from lockstep.torch_internals.fsdp2_gathered import ShardedModule


class BlockGroups:
    """Belongs to one sharded model.

    Args:
        groups: Modules that were sharded together, in their order in the model; only those of several modules.
        others: Blocks that were sharded by themselves.
    """

    def __init__(self, groups: list[list[ShardedModule]], others: list[ShardedModule]) -> None:
        self._group_of = {module: group for group in groups for module in group}
        self.groups = groups
        self._open: list[ShardedModule] | None = None
        for group in groups:
            fsdp2_forward.drop_hooks(group[0])
            for module in group:
                module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
                module.register_forward_hook(self._after)
        if groups:
            for module in others:
                module.register_forward_pre_hook(self._other_begins, prepend=True)

    def end(self, *_: object) -> None:
        """End the forward of the group that was called last, unless it has ended."""
        group, self._open = self._open, None
        if group is not None and fsdp2.is_in_forward(group[0]):
            fsdp2_forward.end_forward(group[0])

    def forget(self) -> None:
        """Forget a forward that has raised, and torch's state was reset."""
        self._open = None

    def call_empty(self, block: ShardedModule, values: object, inside: Callable[[object], object]) -> object:
        """Pass ``values`` by a block as ``call_empty`` of torch's hooks does, with ``inside`` in its place."""
        if block not in self._group_of:
            self.end()
            return call_empty(block, values, inside)
        begun = self._before(block, (values,), {})
        carried = values if begun is None else begun[0][0]
        output = inside(carried)
        ended = self._after(block, (carried,), output)
        return output if ended is None else ended

    @disable
    def _before(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        group = self._group_of[module]
        if group is not self._open:
            self.end()
            # A backward that computes blocks again opens no group: the group's end could not be told.
            if current_pass() == -1:
                self._open = group
            else:
                fsdp2_forward.begin_again(module)
        # A block before it has gathered the weights of the whole group.
        if fsdp2.is_in_forward(module):
            return None
        return fsdp2.pre_forward(module, module, args, kwargs)

    @disable
    def _after(self, module: nn.Module, args: object, output: object) -> object:
        if fsdp2_forward.is_before_backward(module):
            return None
        is_last = module is self._group_of[module][-1]
        # After one that is called by itself no other may come to end the group.
        if is_last or current_pass() != -1 or fsdp2_forward.is_forward_root(module):
            self._open = None
            return fsdp2.post_forward(module, module, args, output)
        # The weights stay for the blocks after this one.
        return fsdp2_forward.gather_for_backward(module, output)

    @disable
    def _other_begins(self, *_: object) -> None:
        self.end()
