"""``fully_shard``'s whole parameters while they stand in the module: what a script changes of them by hand.

torch drops a whole parameter when it shards again, with all that was written to it. Here a write is noticed, and goes
into this rank's shard before that. A ``param`` is torch's ``FSDPParam``, a ``group`` its ``FSDPParamGroup``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.torch_internals.autograd import is_in_backward
from lockstep.torch_internals.compile import is_tracing
from lockstep.torch_internals.tensors import bits_digest, storage_key, version
from lockstep.torch_internals.versions import expect, probed

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DATA: Any = torch.Tensor.data
GRAD: Any = torch.Tensor.grad
"""torch's own attributes, behind those of ``GatheredParameter``."""

FSDPParam: TypeAlias = Any
"""Torch's private record of one sharded parameter, whose attributes differ between versions."""
FSDPParamGroup: TypeAlias = Any
"""That of parameters that are gathered together."""
ShardedModule: TypeAlias = Any
"""A module of which torch has made an ``FSDPModule``, too: Python has no name for a type that is both."""

Changed = Callable[[FSDPParam, torch.Tensor, bool], None]


class GatheredParameter(nn.Parameter):
    """A whole parameter, in the module between forward and the end of backward or of a window.

    Its version counter does not tell of writes to ``data``, so it is noted that a script has asked for that. Its
    ``grad`` is the shard's, where that has been reduced already: of a window's earlier micro-batches.
    """

    _watched: WatchedParameter | None = None

    @property
    def data(self) -> torch.Tensor:
        if self._watched is not None and not is_tracing():
            self._watched.data_is_taken()
        tensor: torch.Tensor = DATA.__get__(self)
        return tensor

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if self._watched is not None:
            self._watched.data_is_taken()
        DATA.__set__(self, value)

    @property
    def grad(self) -> torch.Tensor | None:
        own: torch.Tensor | None = GRAD.__get__(self)
        # torch reads ``grad`` itself in backward, and must see its own.
        if own is not None or self._watched is None or is_in_backward() or is_tracing():
            return own
        return self._watched.reduced_grad()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self._watched is None or is_in_backward() or not self._watched.set_reduced_grad(value):
            GRAD.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, nn.Parameter]) -> nn.Parameter:
        """A parameter of its own."""
        if id(self) not in memo:
            whole = DATA.__get__(self).clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(whole, self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: object) -> str | tuple[object, ...]:
        """As a plain parameter."""
        return nn.Parameter(DATA.__get__(self), self.requires_grad).__reduce_ex__(protocol)


def watch(whole: Any, watched: object) -> None:
    """Let a plain parameter be a ``GatheredParameter``: the same object, of which autograd knows."""
    # Its class is changed in place, because autograd, hooks and the module refer to this very object.
    whole.__class__ = GatheredParameter
    whole._watched = watched


def own_grad(tensor: object) -> torch.Tensor | None:
    """The gradient at this very tensor."""
    found: torch.Tensor | None = GRAD.__get__(tensor)
    return found


def set_own_grad(tensor: object, gradient: torch.Tensor | None) -> None:
    """Set that one."""
    GRAD.__set__(tensor, gradient)


def watch_group(
    group: FSDPParamGroup,
    is_exact: bool,
    changed: Changed,
    cleared: Callable[[object], None],
    before_drop: Callable[[], None],
) -> WatchedGroup:
    """Keep what is written by hand to the gathered parameters of a group, from now on.

    Args:
        is_exact: Parameters are gathered as they are: not quantised.
        changed: Called with (param, whole tensor, whether the change is lost) before the whole is dropped.
        cleared: Called with a param when a script has set its gradient to None.
        before_drop: Called before gathered parameters are dropped; may raise.

    Relies on: all callers look ``_to_unsharded``, ``_to_sharded`` and ``_to_sharded_post_forward`` up at the group;
    they do nothing where the group is so already.
    """
    watched = WatchedGroup(group, is_exact, changed, cleared)
    to_unsharded, to_sharded = group._to_unsharded, group._to_sharded
    to_sharded_post_forward = group._to_sharded_post_forward

    def gather() -> None:
        # torch calls it also where the weights are gathered already, and what was noted before still counts.
        is_new = not group.is_unsharded
        to_unsharded()
        if is_new:
            watched.gathered()

    def drop() -> None:
        before_drop()
        # Before torch frees the memory in which the changes are.
        watched.keep()
        to_sharded()

    def drop_after_forward() -> None:
        before_drop()
        watched.keep()
        to_sharded_post_forward()

    group._to_unsharded, group._to_sharded = gather, drop
    group._to_sharded_post_forward = drop_after_forward
    return watched


class WatchedGroup:
    """See ``watch_group``."""

    def __init__(
        self, group: FSDPParamGroup, is_exact: bool, changed: Changed, cleared: Callable[[object], None]
    ) -> None:
        self._group = group
        self._params = [WatchedParameter(group, param, is_exact, cleared) for param in group.fsdp_params]
        self._changed = changed

    def gathered(self) -> None:
        """Take note of what has just been gathered. About 0.7 µs a parameter."""
        for param in self._params:
            param.gathered()

    def keep(self) -> None:
        """Write to the shards what was changed by hand. About 0.2 µs a parameter where nothing was."""
        if self._group.is_unsharded:
            for one in self._params:
                if one.may_have_changed():
                    self._keep(one)

    @torch.no_grad()
    def _keep(self, one: WatchedParameter) -> None:
        is_kept = one.keep()
        if is_kept is not None:
            self._changed(one.param, DATA.__get__(one.param._unsharded_param), not is_kept)
        one.restore()

    def shards(self) -> Iterator[tuple[DTensor, Callable[[], None]]]:
        """(shard, what is to be called when a script asks for its ``data``) of each parameter."""
        return ((one.param.sharded_param, one.data_of_shard_is_taken) for one in self._params)

    def shards_changed(self) -> bool:
        """Whether a shard was written to since its whole was gathered, which shows old numbers now."""
        return bool(self._group.is_unsharded) and any(one.shard_changed() for one in self._params)


class WatchedParameter:
    """One parameter of a group."""

    def __init__(
        self, group: FSDPParamGroup, param: FSDPParam, is_exact: bool, cleared: Callable[[object], None]
    ) -> None:
        self.param = param
        self._group = group
        self._is_exact = is_exact
        self._cleared = cleared
        self._whole: Any = None
        self._version = 0
        self._shard_version = 0
        # Of all bits, before a script got what it can write to unnoticed; None: it has not asked for it.
        self._before: int | None = None
        # The same of the shard.
        self._shard_before: int | None = None

    def gathered(self) -> None:
        """Relies on: ``_unsharded_param`` is made once, a plain parameter unless tensor parallelism has split it."""
        whole = self.param._unsharded_param
        if whole is not self._whole:
            self._whole = whole
            if type(whole) is nn.Parameter:
                watch(whole, self)
        self._version = _version(whole)
        self._shard_version = self._version_of_shard()
        self._before = self._shard_before = None

    def may_have_changed(self) -> bool:
        return self._before is not None or (
            self._whole is not None and _version(self._whole) != self._version
        )

    def shard_changed(self) -> bool:
        return self._version_of_shard() != self._shard_version or (
            self._shard_before is not None
            and self._shard_before != bits_digest(self.param.sharded_param._local_tensor)
        )

    def data_of_shard_is_taken(self) -> None:
        """The same, of the shard."""
        if self._shard_before is None and self._group.is_unsharded:
            self._shard_before = bits_digest(self.param.sharded_param._local_tensor)

    def data_is_taken(self) -> None:
        """A script has what it can write to unnoticed."""
        if self._before is None and self._group.is_unsharded:
            # ``data`` has a version of its own: only the bits tell whether it is written to.
            self._before = bits_digest(DATA.__get__(self._whole))

    def keep(self) -> bool | None:
        """Write this rank's rows to its shard. None: nothing has changed; False: that cannot be done."""
        is_written = _version(self._whole) != self._version
        if not is_written and bits_digest(DATA.__get__(self._whole)) == self._before:
            return None
        rows, shard = self._rows(), self.param.sharded_param._local_tensor
        # In bf16 or quantised, the rows have fewer bits than the shard, and would round it. A shard that was changed
        # as well has two new values: neither may win unseen.
        if rows is None or not self._is_exact or rows.dtype != shard.dtype or self.shard_changed():
            return False
        shard.copy_(rows)
        self._shard_version, self._shard_before = self._version_of_shard(), None
        return True

    def restore(self) -> None:
        """Let the whole parameter have the memory again that torch gathers into, if ``data`` was set to another."""
        if self._is_moved():
            param = self.param
            DATA.__set__(
                self._whole,
                torch.as_strided(
                    param.all_gather_outputs[0], param._orig_size, param._contiguous_orig_stride
                ),
            )
        self._version, self._before = _version(self._whole), None

    def _is_moved(self) -> bool:
        """Relies on: a whole parameter is a view of ``all_gather_outputs[0]``, of ``_orig_size``."""
        outputs = self.param.all_gather_outputs
        return (
            isinstance(self._whole, GatheredParameter)
            and len(outputs) == 1
            and storage_key(self._whole) != storage_key(outputs[0])
        )

    def _rows(self) -> torch.Tensor | None:
        """This rank's rows of the whole, flat; None where they are not to be told.

        Relies on: the parts of all ranks are gathered one after the other, each padded to
        ``padded_sharded_param_size``, cut along the first dimension but under tensor parallelism.
        """
        param, whole = self.param, DATA.__get__(self._whole)
        if not isinstance(self._whole, GatheredParameter) or whole.shape != param._orig_size:
            return None
        # Rank r's part begins at r padded sizes; those of the last ranks are shorter, or empty.
        start = param.padded_sharded_param_size.numel() * self._group.mesh_info.shard_mesh_rank
        count = param.sharded_param._local_tensor.numel()
        rows: torch.Tensor = whole.detach().reshape(-1)[start : start + count]
        return rows.view(param.sharded_param._local_tensor.shape)

    def _version_of_shard(self) -> int:
        return _version(self.param.sharded_param._local_tensor)

    # Gradients ----------------------------------------------------------------------------------------

    def reduced_grad(self) -> torch.Tensor | None:
        """What has been reduced to the shards of all ranks, a DTensor."""
        if getattr(self._group, "_partial_reduce_output", None) is not None:
            raise UsageError(
                "Inside an accumulation window each gradient of a sharded model with replicas is a sum over "
                "some of the ranks, so p.grad does not have it yet. Read and change gradients where "
                "accelerator.sync_gradients is true."
            )
        gradient: torch.Tensor | None = self.param.sharded_param.grad
        return gradient

    def set_reduced_grad(self, value: torch.Tensor | None) -> bool:
        """Whether this has set it, and nothing else is to be done."""
        from torch.distributed.tensor import DTensor

        shard = self.param.sharded_param
        if value is None:
            had_one = shard.grad is not None or own_grad(self._whole) is not None
            shard.grad = None
            if had_one:
                self._cleared(self.param)
            return False
        if isinstance(value, DTensor) and isinstance(self._whole, GatheredParameter):
            shard.grad = value
            return True
        if shard.grad is not None:
            raise UsageError(
                f"p.grad of a sharded parameter of shape {tuple(shard.shape)} was set to a plain tensor inside "
                "an accumulation window, where it is a shard of the averaged gradient. Change it in place "
                "(p.grad.mul_(2)), or where accelerator.sync_gradients is true."
            )
        return False


def _version(tensor: torch.Tensor) -> int:
    """Tensors of inference mode have none."""
    return 0 if tensor.is_inference() else tensor._version


class _ProbeParameter:
    """Stands for a ``WatchedParameter`` in the probe."""

    def __init__(self) -> None:
        self.count = 0

    def data_is_taken(self) -> None:
        self.count += 1

    def reduced_grad(self) -> torch.Tensor | None:
        return None


@probed("Tensor", "lets parameters be of a subclass")
def probe() -> None:
    """Train a parameter that has become a ``GatheredParameter``."""
    parameter = nn.Parameter(torch.ones(2))
    asked = _ProbeParameter()
    watch(parameter, asked)
    expect(isinstance(parameter, nn.Parameter) and parameter.is_leaf, "a parameter of a subclass")
    before = version(parameter)
    parameter.data.mul_(2)
    expect(
        asked.count == 1 and version(parameter) == before, "a write to data, which the version does not show"
    )
    with torch.no_grad():
        parameter.detach().mul_(2)
    expect(version(parameter) == before + 1 and DATA.__get__(parameter).tolist() == [4.0, 4.0], "a write")
    (parameter * 3).sum().backward()
    found = own_grad(parameter)
    expect(found is not None and found.tolist() == [3.0, 3.0], "the gradient of a subclass")
    parameter.data = torch.zeros(2)
    expect(asked.count == 2 and parameter.tolist() == [0.0, 0.0], "data that was set")
