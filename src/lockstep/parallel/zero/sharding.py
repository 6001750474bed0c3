"""What a sharded model needs in a step beyond torch's own hooks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lockstep.comm.dtensor import local
from lockstep.comm.tree import tensor_leaves
from lockstep.errors import UsageError
from lockstep.model.contents import is_plain
from lockstep.offload.files.direct import OffloadedParameters
from lockstep.parallel.zero.block_groups import BlockGroups
from lockstep.parallel.zero.calls import OtherCalls, SkippedBlocks
from lockstep.parallel.zero.first_step import FirstStep
from lockstep.parallel.zero.unused import UnusedParameters
from lockstep.torch_internals import c10d, fsdp2, fsdp2_forward
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals.fsdp2_gathered import FSDPParam, FSDPParamGroup, ShardedModule
from lockstep.torch_internals.optim import stepped_by

if TYPE_CHECKING:
    from lockstep.parallel.zero.exchange import ShardCollective

# Of one message, as in DDP.
BROADCAST_BYTES = 250 * 2**20
COMPARED_EVERY = 100
"""Steps between two comparisons of an optimizer's settings."""


class _Flags(NamedTuple):
    """What a backward does: reduce gradients to shards, add these up over replicas, let whole parameters go."""

    reduce: bool = True
    all_reduce: bool = True
    reshard: bool = True


class Sharding:
    """Belongs to one sharded model: what torch's engine does in its steps, and when.

    Args:
        stage: Of ZeRO.
        groups: The modules that ``fully_shard`` was applied to; the first is the model itself.
        whole: Parameters that every rank holds whole.
        buffers: (module, name) of each buffer that rank 0 hands out before a forward.
        group: The ranks with parts of this model; None: all.
        parallel: The line that asked for this, for messages.
        steps_in_background: Shards may be stepped while their wholes are gathered.
        block_groups: Blocks that were sharded together, where there are several.

    Attributes:
        collectives: What gathers and reduces its shards, where that is ours.
        is_summoned: All weights are gathered, and forwards leave them so.
    """

    def __init__(
        self,
        stage: int,
        groups: list[ShardedModule],
        whole: list[nn.Parameter],
        buffers: list[tuple[nn.Module, str]],
        group: dist.ProcessGroup | None = None,
        parallel: object = "zero",
        steps_in_background: bool = False,
        block_groups: Sequence[list[ShardedModule]] = (),
    ) -> None:
        self.stage = stage
        self._root = groups[0]
        self._modules = groups
        # One of the modules that were sharded together does for all.
        self._groups = fsdp2_forward.one_of_each_group(groups)
        self._whole = whole
        self.has_whole = bool(whole)
        self._buffers = buffers
        self._group = group
        self._flags = _Flags()
        self._is_broken = False
        self._steps = 0
        self.collectives: Sequence[ShardCollective] = ()
        self.is_summoned = False
        self.unused = UnusedParameters(groups, self.parameter_groups())
        self._first_step: FirstStep | None = FirstStep(
            groups, self.parameter_groups(), group, not steps_in_background, parallel
        )
        together = {block for blocks in block_groups for block in blocks}
        # Before the hooks of what follows, which come first in a call then.
        self.blocks = BlockGroups(
            list(block_groups), [block for block in groups[1:] if block not in together]
        )
        self.skipped = SkippedBlocks(groups[1:], self._passed, self.blocks.call_empty)
        self.calls = OtherCalls(
            groups, self.before_call, self.after_call, lambda: self.is_summoned, self.blocks.end
        )

    def step_with_closure(self) -> None:
        """Leave out the comparison before the first step, whose forwards follow."""
        if self._first_step is not None:
            self._first_step.end()
            self._first_step = None

    def _passed(self, block: ShardedModule) -> None:
        self.unused.passed(block)
        if self._first_step is not None:
            self._first_step.comes_to(block)

    @property
    def modules(self) -> list[ShardedModule]:
        """The modules that ``fully_shard`` was applied to; the first is the model itself."""
        return self._modules

    def shards(self, names: Mapping[int, str]) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, shard) of each sharded parameter; ``names`` by ``id`` of what stands in the model now."""
        for parameter in self.parameters():
            yield name_of_shard(parameter, names), fsdp2.sharded_param(parameter)

    def inside_window(self) -> AbstractContextManager[None]:
        """Backward inside is that of a micro-batch which does not end its accumulation window.

        Stage 1 keeps each rank's own whole gradients. The others reduce to shards at once, and leave only
        the sum over replicas to the window's end. Stages 1 and 2 keep the gathered parameters.
        """
        return self._without_all_reduce(reduce=self.stage >= 2)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward inside adds to each rank's own whole gradients; they are not communicated."""
        return self._without_all_reduce(reduce=False)

    @contextmanager
    def _without_all_reduce(self, reduce: bool) -> Iterator[None]:
        before = self._flags
        # Inside of ``no_sync`` a window does not reduce either.
        with self._flagged(_Flags(reduce and before.reduce, all_reduce=False, reshard=self.stage == 3)):
            yield

    def synchronised(self) -> AbstractContextManager[None]:
        """Backward inside averages, also within the others."""
        return self._flagged(_Flags())

    @contextmanager
    def _flagged(self, flags: _Flags) -> Iterator[None]:
        before = self._flags
        self._set_flags(flags)
        try:
            yield
        finally:
            self._set_flags(before)

    def _set_flags(self, flags: _Flags) -> None:
        self._flags = flags
        for group in self._groups:
            group.set_requires_gradient_sync(flags.reduce, recurse=False)
            group.set_requires_all_reduce(flags.all_reduce, recurse=False)
            group.set_reshard_after_backward(flags.reshard, recurse=False)

    @property
    def _is_in_no_sync(self) -> bool:
        return not self._flags.all_reduce

    def reshard(self) -> None:
        """Drop gathered parameters, which are stale once the optimizer has stepped."""
        for group in self._groups:
            group.reshard()

    def before_forward(self, *_: object) -> None:
        """Prepare for a call of the model itself. Raises as ``before_call``. Collective."""
        if self.is_summoned:
            return
        if not self.calls.is_open:
            self.before_call()
        self.calls.forward_begins()
        self.skipped.forward_begins()

    def before_call(self) -> None:
        """Give all ranks rank 0's buffers, as DDP does; not inside a window. Collective.

        Raises:
            UsageError: a forward or backward raised before, and this torch cannot start again after that.
        """
        if self._is_broken:
            raise UsageError(
                "A forward or backward of this sharded model raised an exception before. Only torch 2.13 or newer can "
                f"go on after that, but this is {torch.__version__}. Build and prepare the model again, or use "
                "parallel='ddp'."
            )
        if self._buffers and not self._is_in_no_sync:
            broadcast_buffers(self._buffers, self._group)

    def after_forward(self, *_: object) -> None:
        """Drop gathered parameters that no backward of training needs. Kept ones stand in the model in the shards'
        place: changes made to them by hand would be lost, and those made to the shards not seen.

        Called after a forward that raised, too.
        """
        self.skipped.leave()
        self.calls.forward_ends()
        if self.calls.is_open or self.is_summoned:
            return
        # torch did not see the end of this forward, so it has raised.
        if fsdp2.is_in_forward(self._root):
            self.recover()
        # In evaluation also with a graph, whose backward gathers them again: averages are often swapped in around it.
        elif not torch.is_grad_enabled() or not self._root.training:
            self.reshard()

    def after_call(self, output: object) -> None:
        """Do what ``after_forward`` does, for another method or an inner module that was called by itself."""
        if fsdp2.is_in_forward(self._root):
            self.recover()
        elif not any(leaf.requires_grad for leaf in tensor_leaves(output).values()):
            self.reshard()

    def _refuse_to_drop(self) -> NoReturn:
        raise UsageError(
            f"The weights of {type(self._root).__name__.removeprefix('FSDP')} must stay whole inside "
            "summon_full_params, but this call would shard them again, as optimizer.step(), state_dict(), "
            "load_state_dict() and save_state() do. Call it after the block."
        )

    def recover(self) -> None:
        """Forget a forward or backward that raised: what it left behind would spoil the next one's gradients."""
        self.unused.forget()
        self.blocks.forget()
        if hasattr(self._root, "reset_iter_state"):
            self._root.reset_iter_state()
        else:
            self._is_broken = True

    @contextmanager
    def summoned(self) -> Iterator[None]:
        """Gather all weights once, and let them go at the end; forwards inside send nothing. Collective."""
        if self.is_summoned:
            yield
            return
        # What is gathered may be older than the shards.
        self.reshard()
        if self._buffers:
            broadcast_buffers(self._buffers, self._group)
        try:
            with fsdp2.gathered_by_hand(self._root, self._refuse_to_drop):
                self.is_summoned = True
                yield
                if self._first_step is not None:
                    self._first_step.forget()
                for group in self.parameter_groups():
                    fsdp2.write_back(group)
        finally:
            self.is_summoned = False
            self.reshard()

    def gathered(self) -> Iterator[tuple[torch.Tensor, nn.Parameter]]:
        """Yield (whole parameter, its shard) of each that is gathered now."""
        for group in self.parameter_groups():
            if fsdp2.is_unsharded(group):
                for parameter in fsdp2.params(group):
                    yield fsdp2.unsharded_param(parameter), fsdp2.sharded_param(parameter)

    @torch.no_grad()
    def gradients(self) -> Iterator[torch.Tensor]:
        """Return the tensors in which this rank accumulates gradients now: shards, and what is not yet reduced."""
        for group in self.parameter_groups():
            for parameter in fsdp2.params(group):
                gradient = fsdp2.sharded_param(parameter).grad
                if gradient is not None:
                    yield local(gradient)
                yield from map(local, fsdp2.unreduced_grads(parameter))
            # With replicas: summed over the shards of this replica, and kept by torch until the window ends.
            partial = fsdp2.partial_reduce_output(group)
            if partial is not None:
                yield partial
        for parameter in self._whole:
            if parameter.grad is not None:
                yield parameter.grad

    def own_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, gradient) of what is not reduced yet."""
        names = {id(parameter): name for name, parameter in self._root.named_parameters()}
        for parameter in self.parameters():
            for number, gradient in enumerate(fsdp2.unreduced_grads(parameter)):
                yield name_of_shard(parameter, names) + "'" * number, local(gradient)
        for whole in self._whole:
            if whole.grad is not None:
                yield names[id(whole)], whole.grad

    def check_step(self, optimizer: Optimizer) -> None:
        """Raise UsageError before a step if gradients of its shards are this rank's own whole ones.

        About 0.5 µs a parameter. Collective in the first step, and in every hundredth.

        Raises:
            UsageError: also where the optimizer's settings differ between the ranks, and what ``FirstStep`` finds.
        """
        shards = (id(fsdp2.sharded_param(parameter)) for parameter in self.parameters())
        if self._steps % COMPARED_EVERY == 0 and not stepped_by(optimizer).isdisjoint(shards):
            _compare_settings(optimizer, fsdp2.device_of(self.parameter_groups()[0]), self._group)
        self._steps += 1
        if self._first_step is not None and not stepped_by(optimizer).isdisjoint(shards):
            first_step, self._first_step = self._first_step, None
            first_step.check()
        for parameter in self.parameters():
            if fsdp2.unreduced_grads(parameter) and id(fsdp2.sharded_param(parameter)) in stepped_by(
                optimizer
            ):
                name = name_of_shard(parameter, {id(p): name for name, p in self._root.named_parameters()})
                raise UsageError(
                    f"'{name}' of {type(self._root).__name__.removeprefix('FSDP')} has a gradient that was not "
                    "averaged over the ranks, so the step would not use it: its backward ran inside no_sync, or "
                    "the loss was not computed from an output of the model. Run the last backward before a step "
                    "outside no_sync, and return from forward what the loss is computed from."
                )

    def has_unreduced(self) -> bool:
        """Return whether gradients have not come to the shards of all ranks yet."""
        if any(fsdp2.unreduced_grads(parameter) for parameter in self.parameters()):
            return True
        return any(fsdp2.partial_reduce_output(group) is not None for group in self.parameter_groups())

    def discard_unreduced(self, of: Iterable[torch.Tensor]) -> None:
        """Forget gradients of these shards that were not reduced yet: ``zero_grad`` does not see them."""
        ids = {id(shard) for shard in of}
        for group in self.parameter_groups():
            found = [p for p in fsdp2.params(group) if id(fsdp2.sharded_param(p)) in ids]
            for parameter in found:
                fsdp2.discard_unreduced_grad(parameter)
            # A sum over some ranks is of all parameters of its group together.
            if found:
                fsdp2.discard_partial_reduce_output(group)

    def parameters(self) -> Iterator[FSDPParam]:
        """Return torch's own records of the parameters."""
        return (parameter for group in self.parameter_groups() for parameter in fsdp2.params(group))

    def parameter_groups(self) -> list[FSDPParamGroup]:
        """Return torch's own records of the parameters that are gathered together."""
        # Modules that were sharded together have one between them.
        return list(dict.fromkeys(group for module in self._groups for group in fsdp2.param_groups(module)))


@torch.no_grad()
def offload_shards(module: nn.Module, offloaded: OffloadedParameters) -> None:
    """Keep this rank's shards of a sharded module's own parameters in ``offloaded``."""
    for group in fsdp2.param_groups(module):
        for parameter in fsdp2.params(group):
            fsdp2.move_shard(parameter, offloaded.keep)


def name_of_shard(parameter: FSDPParam, names: Mapping[int, str]) -> str:
    """Return the name of torch's record of one sharded parameter, whichever of its forms stands in the model now."""
    found = (names.get(id(form)) for form in fsdp2.forms(parameter))
    return next(name for name in found if name is not None)


@torch.no_grad()
def broadcast_buffers(buffers: list[tuple[nn.Module, str]], group: dist.ProcessGroup | None) -> None:
    """Give all ranks of ``group`` the first one's values, in place. Collective."""
    found = [(module, torch_modules.buffers_of(module)[name]) for module, name in buffers]
    # Two forwards may precede one backward, which batch normalisation does without the running statistics, though
    # autograd keeps them. Through ``data`` it does not take them for changed, as with torch's own update of them.
    tensors = [b.data if isinstance(module, torch_modules.BatchNorm) else b for module, b in found]
    c10d.broadcast_coalesced(group or dist.group.WORLD, tensors, BROADCAST_BYTES, 0)


def synchronised_buffers(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return (module, name) of the buffers that may change in training: saved ones that are not masks (bool)."""
    return [
        (module, name)
        for module in model.modules()
        for name, buffer in torch_modules.buffers_of(module).items()
        if buffer is not None and torch_modules.is_persistent(module, name) and buffer.dtype is not torch.bool
    ]


def _compare_settings(optimizer: Optimizer, device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Raise UsageError on all ranks if settings of an optimizer differ between them. Collective."""
    found = [each.get(name) for each in optimizer.param_groups for name in optimizer.defaults]
    plain = [v.tolist() if isinstance(v, torch.Tensor) else v for v in found]
    number = zlib.crc32(repr([value for value in plain if is_plain(value)]).encode())
    # The maximum of the negated numbers is the negated minimum.
    numbers = torch.tensor([number, -number], device=device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    if int(numbers.sum()) != 0:
        raise UsageError(
            "The settings of an optimizer, such as lr in its param_groups, differ between the ranks. Each rank steps "
            "its part of a sharded weight, so one weight would follow different rules. Compute settings from numbers "
            "that are equal on all ranks, such as accelerator.reduce(loss.detach(), 'mean')."
        )
