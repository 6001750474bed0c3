"""What the ranks of a sharded model tell each other with the gradients of a step, in one small reduction.

*Unused parameters*: a head for each kind of batch, chosen experts. torch concatenates the gradients of a group that
exist on a rank and adds up what the ranks send, so that ranks with other gradients add those of one parameter to
another's. Here a missing gradient counts as zeros, as in the mean over all ranks. Then the reduction says which
parameters no rank has used: these get no gradient at all, so that no optimizer decays them or goes on with their
momentum, as in plain torch.

*Changes by hand* of weights while they are gathered: in a forward, before backward, or in a window. The change goes
into a rank's rows of the whole parameter, and from these into its shard (``fsdp2_gathered``). So it must be the same on
all ranks, as in plain torch one process makes one change: each rank keeps a number of what was changed, and they
compare these.

*Settings of optimizers*, such as a learning rate that follows a loss, are compared in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist

from lockstep.comm.collectives import tensor_of
from lockstep.errors import UsageError
from lockstep.torch_internals import fsdp2
from lockstep.torch_internals import fsdp2_backward as engine
from lockstep.torch_internals.autograd import current_backward as current_pass
from lockstep.torch_internals.dtensor_views import LostChanges
from lockstep.torch_internals.fsdp2_forward import one_of_each_group
from lockstep.torch_internals.fsdp2_gathered import (
    FSDPParam,
    FSDPParamGroup,
    ShardedModule,
    WatchedGroup,
    watch_group,
)
from lockstep.torch_internals.tensors import bits_digest

NUMBER_BYTES = 4
"""Of a number that ranks share which called the same blocks in the same order; of one of changes, one of settings."""


class ChangesByHand:
    """Belongs to one sharded model.

    Args:
        root: The model.
        groups: torch's records of the parameters that are gathered together.
        is_exact: Weights are gathered as they are: not quantised.
    """

    def __init__(self, root: torch.nn.Module, groups: list[FSDPParamGroup], is_exact: bool) -> None:
        self._root = root
        self._numbers = {
            id(param): n for n, param in enumerate(p for group in groups for p in fsdp2.params(group))
        }
        self._digest = 0
        self._changed: FSDPParam | None = None
        self._lost: tuple[FSDPParam, str] | None = None
        self.cleared: Callable[[set[int]], None] | None = None
        self.before_drop: Callable[[], None] | None = None
        self._groups: list[WatchedGroup] = [
            watch_group(group, is_exact, self._note, self._clear, self._before_drop) for group in groups
        ]

    def _before_drop(self) -> None:
        if self.before_drop is not None:
            self.before_drop()

    def digest(self) -> bytes:
        """Equal on ranks that have made the same changes since the last one."""
        return (self._digest & (2 ** (8 * NUMBER_BYTES) - 1)).to_bytes(NUMBER_BYTES, "little")

    def take(self) -> FSDPParam | None:
        """One of those that this rank has changed since the last call, which the digest is of."""
        changed, self._digest, self._changed = self._changed, 0, None
        return changed

    def notice_data(self, lost_changes: LostChanges) -> None:
        """Be told when a script asks for the ``data`` of a shard, which versions do not show."""
        for group in self._groups:
            for shard, call in group.shards():
                lost_changes.notice_data(shard, call)

    def shards_changed(self) -> bool:
        """Whether shards were written to while their wholes are gathered, which do not show that."""
        return any(group.shards_changed() for group in self._groups)

    def refuse(self, changed: FSDPParam | None) -> NoReturn:
        """Raise UsageError for changes that are not the same on all ranks."""
        what = "A weight" if changed is None else f"'{self._name(changed)}'"
        raise UsageError(
            f"{what} of {self._kind} was changed by the script in this step while it was gathered (inside a "
            "forward, between forward and backward, or in an accumulation window). The change was not the "
            "same on all ranks, so rows of different weights were joined. Make the same change on all "
            "ranks, from numbers that are equal on all of them, such as accelerator.reduce(tensor, 'mean')."
        )

    def check_lost(self) -> None:
        """Raise UsageError if changes are lost. Forgets them."""
        if self._lost is None:
            return
        (param, why), self._lost = self._lost, None
        self.take()
        raise UsageError(
            f"'{self._name(param)}' of {self._kind} was changed by the script while it was gathered {why}. "
            "Change weights after optimizer.step(), before the forward of the next window."
        )

    def _note(self, param: FSDPParam, whole: torch.Tensor, is_lost: bool) -> None:
        self._changed = param
        if is_lost and self._lost is None:
            self._lost = param, self._reason(param, whole)
        number = 0 if is_lost else bits_digest(whole)
        # Of numbers alone: Python's hash of text is another one in each process.
        self._digest = hash((self._digest, self._numbers[id(param)], number, is_lost))

    @staticmethod
    def _reason(param: FSDPParam, whole: torch.Tensor) -> str:
        shard = fsdp2.sharded_param(param)
        if whole.dtype != shard.dtype:
            return f"in {whole.dtype}, which has too few bits for the stored {shard.dtype}".replace(
                "torch.", ""
            )
        if whole.shape != shard.shape:
            return f"and has shape {tuple(whole.shape)} now, not {tuple(shard.shape)}"
        return "in a form from which the stored weights cannot be changed, or at two places at once"

    def _clear(self, param: FSDPParam) -> None:
        if self.cleared is not None:
            self.cleared({id(fsdp2.sharded_param(param))})

    @property
    def _kind(self) -> str:
        return type(self._root).__name__.removeprefix("FSDP")

    def _name(self, param: FSDPParam) -> str:
        forms = list(fsdp2.forms(param))
        return next((n for n, p in self._root.named_parameters() if any(p is f for f in forms)), "?")


class UnusedParameters:
    """Belongs to one sharded model.

    Args:
        modules: Those that ``fully_shard`` was applied to.
        groups: torch's records of the parameters that are gathered together.
        ranks: Those with replicas or shards of the parameters; None: all.
        changes: Weights changed by hand, which the ranks compare with the same message.
    """

    def __init__(
        self,
        modules: list[ShardedModule],
        groups: list[FSDPParamGroup],
        ranks: dist.ProcessGroup | None,
        changes: ChangesByHand,
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
        self._sent: _Sent | None = None
        # A number of the settings of the optimizers that step these shards.
        self.settings: Callable[[], int] = lambda: 0
        # Compiled code leaves the hook out, but on a rank that has given up compiling, as after many shapes, it runs.
        compiled = {part for m in modules[0].modules() if engine.is_compiled(m) for part in m.modules()}
        for number, module in enumerate(modules):
            if module not in compiled:
                module.register_forward_pre_hook(partial(self._comes_to, number))
        for group in groups:
            engine.before_reduction(group, self._before_reduction_of(group))
        engine.keep_for_another_backward(groups)
        for module in one_of_each_group(modules):
            engine.after_reductions(module, self.remove_gradients)

    def backward_begins(self) -> None:
        """Until ``backward_ends`` every group is reduced, whether it was used on this rank or not."""
        self._is_backward = True

    def backward_ends(self) -> None:
        """Take back what is left, where torch has reduced outside of its own callback. Collective."""
        self._is_backward = False
        self.remove_gradients()

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

    def passed(self, module: ShardedModule) -> None:
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

    def _before_reduction_of(self, group: FSDPParamGroup) -> Callable[[], None]:
        def fill() -> None:
            present, missing = engine.present_and_missing(group)
            self._used.update(self._number[id(param)] for param in present)
            if not (present or self._is_backward or id(group) in self._passed):
                # A pass such as that of torch.autograd.grad leaves no gradients.
                return
            # Sums inside a replica go on to the other replicas later: only then can it be said what nobody has used.
            self._reached_shards = self._reached_shards or (
                engine.reaches_shards(group) and bool(present or missing)
            )
            for param in missing:
                if fsdp2.sharded_param(param).grad is None:
                    self._without[self._number[id(param)]] = param
            engine.set_zero(missing, present)

        return fill

    @torch.no_grad()
    def remove_gradients(self) -> None:
        """Remove gradients that no rank has computed. Collective once they have reached the shards."""
        if not self._reached_shards:
            return
        order = (self._order & 0xFFFFFFFF).to_bytes(NUMBER_BYTES, "little")
        shared = [*order, *self._changes.digest(), *self.settings().to_bytes(NUMBER_BYTES, "little")]
        # The maximum of a byte and that of its complement sum to 255 only where all ranks have an equal byte.
        opposite = [255 - byte for byte in shared]
        flags = [int(number in self._used) for number in self._number.values()]
        message = tensor_of([*flags, *shared, *opposite], torch.uint8, self._device)
        dist.all_reduce(message, dist.ReduceOp.MAX, group=self._ranks)
        used, extremes = message.split([len(flags), 2 * len(shared)])
        sent = _Sent(extremes, self._changes.take())
        # Reading waits for an accelerator: there the ranks read, and raise, in the next backward.
        judged, self._sent = (sent, None) if message.device.type == "cpu" else (self._sent, sent)
        try:
            if message.device.type == "cpu":
                self._changes.check_lost()
            if judged is not None:
                self._judge(judged)
        except UsageError:
            self.forget()
            raise
        without = self._without
        # Only then are the numbers read, because on an accelerator reading waits for them.
        if without:
            for number, anywhere in enumerate(used.tolist()):
                if not anywhere and number in without:
                    fsdp2.sharded_param(without[number]).grad = None
        self.forget()

    def _judge(self, sent: _Sent) -> None:
        """Raise UsageError for what differs between the ranks; all of them do so."""
        numbers = sent.read().view(2, -1, NUMBER_BYTES).int().sum(0).eq(255).all(1).tolist()
        of_changes = partial(self._changes.refuse, sent.changed)
        refusals: tuple[Callable[[], None], ...] = (_refuse_order, of_changes, _refuse_settings)
        for is_equal, refuse in zip(numbers, refusals, strict=True):
            if not is_equal:
                refuse()


class _Sent:
    """Numbers of all ranks: the largest of each byte, and of its complement. On their way from an accelerator."""

    def __init__(self, extremes: torch.Tensor, changed: FSDPParam | None) -> None:
        self.changed = changed
        self._extremes, self._arrived = extremes, None
        if extremes.device.type != "cpu":
            self._extremes = torch.empty_like(extremes, device="cpu", pin_memory=True)
            self._extremes.copy_(extremes, non_blocking=True)
            self._arrived = torch.Event(extremes.device)
            self._arrived.record()

    def read(self) -> torch.Tensor:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._extremes


def _refuse_order() -> NoReturn:
    raise UsageError(
        "In this step the ranks called different blocks of a sharded model, or called them in different "
        "orders, so parts of different weights were joined. Let all ranks call the same blocks in the "
        "order in which they stand in the model. A rank may leave some of them out."
    )


def _refuse_settings() -> NoReturn:
    raise UsageError(
        "The settings of an optimizer, such as lr in its param_groups, differ between the ranks. Each rank steps its "
        "part of a sharded weight, so one weight would follow different rules. Compute settings from numbers that are "
        "equal on all ranks, such as accelerator.reduce(loss.detach(), 'mean')."
    )
