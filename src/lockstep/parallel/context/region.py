"""The part of a model in which each rank has its chunk of the sequence: from the first block to the last.

Outside of it every rank has the whole sequence. Backward is the exact adjoint of forward: the gradient of what enters
is zero in other ranks' positions, that of what leaves is the sum of all ranks' gradients. So the local gradients of
*all* parameters have the gradient of the mean of the ranks' losses as their mean.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.tree import leaves, map_leaves, map_tensors
from lockstep.config.enums import CPMethod
from lockstep.errors import LockstepError, UsageError
from lockstep.parallel.blocks import settings
from lockstep.parallel.context.arguments import hidden_states, holds_cache, sequence_dim
from lockstep.parallel.context.checks import OnChunks
from lockstep.parallel.context.interception import SplitSequence
from lockstep.parallel.context.layout import SequenceLayout
from lockstep.parallel.context.position_ids import arguments_on_chunks
from lockstep.parallel.context.rehearse import Call, mixing_operation
from lockstep.parallel.subclass import Subclassed
from lockstep.torch_internals import autograd as torch_autograd
from lockstep.torch_internals import compile as torch_compile


@dataclass
class Region:
    """The blocks of one model, and where a forward through them stands."""

    layout: SequenceLayout
    method: CPMethod
    first: str
    last: str
    split: dict[int, Tensor] | None = None
    """Within ``split_sequence``, where the caller splits and gathers: whole tensors, by the id of their chunk."""
    split_length: int = 0
    """Positions of each rank within ``split_sequence``."""
    last_by_caller: bool = False
    """Whether the caller did in the last forward, to which backward belongs."""
    whole: bool = False
    """This forward is not split: it has no gradients, and a length or a cache that do not allow it."""
    local_length: int | None = None
    """Positions of each rank, from the first block to the last; None outside."""
    attentions: int = 0
    is_inside: bool = False
    """Whether a block is running."""
    around: str = ""
    """Class of the module that the blocks are in, where that is not the model."""
    compared: bool = False
    is_rehearsed: bool = True
    """Whether blocks are, see ``rehearse``."""
    rehearsed: set[str] = field(default_factory=set)
    """Kinds of blocks that were."""

    def begin(self) -> None:
        """A forward of the model starts. One before it may have failed half-way."""
        self.local_length, self.whole, self.attentions, self.is_inside = None, False, 0, False

    def between(self, model: str, error: Exception) -> str:
        """What to say of an error between blocks."""
        text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        whole = (self.local_length or 0) * self.layout.size
        named = f"blocks={self.around}" if self.around else "blocks=..."
        return (
            f"{model}'s forward raises {type(error).__name__} between its blocks '{self.first}' and '{self.last}' "
            f"({text}): there each rank has {self.local_length} of {whole} positions (cp = {self.layout.size}), so "
            "that nothing from before the first block fits. Name modules that get the hidden states one "
            f"after the other, residuals included, with {named}."
        )

    def end(self) -> None:
        """
        Raises:
            UsageError: forward ended inside the region.
        """
        if self.local_length is not None:
            self.local_length = None
            raise UsageError(
                f"The model's forward called block '{self.first}' but not '{self.last}', after which the ranks' chunks "
                "of the sequence are put together. Name the blocks that are always called with blocks=..."
            )


class ContextParallelModel(Subclassed):
    """Mixed into the class of the model itself."""

    _region: Region

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Any = super().__call__  # type: ignore[misc]
        region: Region = self._region
        region.begin()
        mode: Any = nullcontext()
        if region.split is not None and hasattr(getattr(self, "config", None), "_attn_implementation"):
            kwargs = arguments_on_chunks(region.split, self, args, kwargs)
        elif region.split:
            mode = OnChunks(type(self).__name__, region.layout, region.split_length)
        with mode:
            try:
                output = call(*args, **kwargs)
            except Exception as error:  # whatever a user's forward raises
                if region.local_length is None or region.is_inside or isinstance(error, LockstepError):
                    raise
                raise UsageError(region.between(type(self).__name__, error)) from error
        region.end()
        return output


class ContextParallelBlock(Subclassed):
    """Mixed into a block's class by ``context_parallel``.

    ``__call__`` splits and gathers, outside of activation checkpointing; ``forward``, which that repeats, does not.
    ``torch.compile`` leaves both as they are: it loses the mode at the communication in the middle of attention.
    """

    _attributes = ("_block_name", "_argument_names")
    _region: Region
    _block_name: str
    _argument_names: tuple[str, ...]

    @torch_compile.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Any = super().__call__  # type: ignore[misc]
        region, name = self._region, self._block_name
        if not _in_backward():
            region.last_by_caller = region.split is not None
        if region.last_by_caller:
            return call(*args, **kwargs)
        hidden = hidden_states(name, args, kwargs)
        named = {**dict(_with_names(self._argument_names, args)), **kwargs}
        length = _enter(region, name, hidden, named)
        if length is None:
            return call(*args, **kwargs)
        split = _Splitter(name, region, hidden, length)
        args = tuple(split(*item) for item in _with_names(self._argument_names, args))
        region.is_inside = True
        output = call(*args, **{key: split(key, value) for key, value in kwargs.items()})
        region.is_inside = False
        return _leave(region, name, output, hidden.shape[0], length // region.layout.size)

    @torch_compile.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward  # type: ignore[misc]
        region, name = self._region, self._block_name
        if region.whole and not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        hidden = hidden_states(name, args, kwargs)
        if region.last_by_caller and region.layout.head_tail and hidden.shape[1] % 2:
            raise UsageError(
                f"Block '{name}' got {hidden.shape[1]} positions, but with cp_method=ring a rank holds two chunks of "
                "equal length. Split every tensor with a sequence dimension by the same context."
            )
        with SplitSequence(name, region.layout, region.method, *hidden.shape[:2]) as mode:
            output = forward(*args, **kwargs)
        region.attentions += mode.attentions
        if torch.is_grad_enabled() and not _in_backward():
            _rehearse(
                region, self, Call(name, forward, _with_names(self._argument_names, args), kwargs, hidden)
            )
        return output


def _rehearse(region: Region, block: Any, call: Call) -> None:
    """In the first call of each kind of block that learns.

    Raises:
        UsageError: it mixes positions outside of attention; on all ranks alike.
    """
    kind = settings(block)
    if not region.is_rehearsed or kind in region.rehearsed:
        return
    region.rehearsed.add(kind)
    operation = mixing_operation(block, call)
    if operation is not None:
        raise UsageError(
            f"Block '{call.block}' mixes positions outside of attention, as running it on some of them shows "
            f"(it begins with {operation}), but each rank holds a part of the sequence (context parallelism, cp = "
            f"{region.layout.size}). Leave this block out with blocks=..., or do it before or after the blocks."
        )


def _in_backward() -> bool:
    return torch_autograd.is_in_backward()


def _with_names(names: tuple[str, ...], args: tuple[Any, ...]) -> list[tuple[str, Any]]:
    return [(names[i] if i < len(names) else f"argument {i}", value) for i, value in enumerate(args)]


class _Splitter:
    """Takes this rank's chunk of each tensor in a block's arguments that runs along the sequence."""

    def __init__(self, block: str, region: Region, hidden: Tensor, length: int) -> None:
        self.block, self.layout, self.hidden, self.length = block, region.layout, hidden, length

    def __call__(self, name: str, value: Any) -> Any:
        return map_leaves(lambda _, leaf: self._leaf(name, leaf), value)

    def _leaf(self, name: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf is self.hidden:
            return self.layout.local(leaf, 1) if leaf.shape[1] == self.length else leaf
        dim = sequence_dim(self.block, name, leaf, self.hidden.shape[0], self.length)
        return leaf if dim is None else self.layout.local(leaf, dim)


def _enter(region: Region, block: str, hidden: Tensor, named: dict[str, Any]) -> int | None:
    """Length of the whole sequence; None where this forward is not split.

    In a backward, activation checkpointing of the user's own calls single blocks: nothing is known of their order.
    """
    size, length = region.layout.size, hidden.shape[1]
    repeated = _in_backward()
    if block == region.first:
        cached = next((name for name, value in named.items() if holds_cache(name, value)), None)
        if not torch.is_grad_enabled() and (cached or length % region.layout.chunks or length // size < 2):
            region.whole = True
            return None
        if cached:
            raise UsageError(
                f"Block '{block}' got '{cached}', but a split sequence leaves only a part of its keys in a cache. Call "
                "the model with use_cache=False, or under torch.no_grad()."
            )
        region.layout.check(length, f"The sequence that block '{block}' gets")
        if not region.compared:
            _compare(region, hidden)
        region.whole = False
        if not repeated:
            region.local_length, region.attentions = length // size, 0
        return length
    if region.whole and not torch.is_grad_enabled():
        return None
    if not repeated and region.local_length != length:
        if region.local_length is None:
            raise UsageError(
                f"Block '{block}' was called before '{region.first}', where the sequence is split. Call the blocks in "
                "their order, or name those that are with blocks=..."
            )
        raise UsageError(
            f"Block '{block}' got {length} positions, but after '{region.first}' each rank has {region.local_length}. "
            "Blocks must keep the length, and form one chain: name those of one chain with blocks=..."
        )
    return length * size


def _leave(region: Region, block: str, output: Any, batch: int, local_length: int) -> Any:
    tensors = [leaf for leaf in leaves(output).values() if isinstance(leaf, Tensor)]
    if not tensors or tensors[0].shape[:2] != (batch, local_length):
        found = f"{list(tensors[0].shape)}" if tensors else "no tensor"
        raise UsageError(
            f"Block '{block}' got hidden states of {batch} samples and {local_length} positions, but returned {found}. "
            "Context parallelism needs blocks that keep batch and length: name those with blocks=..."
        )
    if block != region.last:
        return output
    if not _in_backward():
        region.local_length = None
        if not region.attentions:
            raise UsageError(
                f"No block from '{region.first}' to '{region.last}' called F.scaled_dot_product_attention, so nothing "
                f"would see the whole sequence (cp = {region.layout.size}). Use it in the model, name the blocks that "
                "do with blocks=..., or leave cp out."
            )

    def gather(tensor: Tensor) -> Tensor:
        runs_along = tensor.ndim > 1 and tensor.shape[:2] == (batch, local_length)
        return region.layout.gather(tensor, 1) if runs_along else tensor

    return map_tensors(gather, output)


def _compare(region: Region, hidden: Tensor) -> None:
    """
    Raises:
        UsageError: the ranks' hidden states have different shapes, so they come from different batches.
    """
    region.compared = True
    shape = torch.tensor(hidden.shape, dtype=torch.int64, device=hidden.device)
    shapes = [tuple(row) for row in region.layout.collect(shape).tolist()]
    if len(set(shapes)) > 1:
        raise UsageError(
            f"The ranks that share a sequence (cp = {region.layout.size}) entered block '{region.first}' with hidden "
            f"states of shapes {shapes}. Give all of them the same batch: prepare the loader."
        )


def regions_of(model: nn.Module) -> list[Region]:
    """The regions in ``model``, of which each has one."""
    found = {id(m._region): m._region for m in model.modules() if isinstance(m, ContextParallelBlock)}
    return list(found.values())
