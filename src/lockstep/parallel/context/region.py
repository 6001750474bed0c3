"""The part of a model in which each rank has its chunk of the sequence: from the first block to the last.

Outside of it every rank has the whole sequence. Backward is the exact adjoint of forward: the gradient of what enters
is zero in other ranks' positions, that of what leaves is the sum of all ranks' gradients. So the local gradients of
*all* parameters have the gradient of the mean of the ranks' losses as their mean.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lockstep.comm.tree import Args, Kwargs, map_leaves, map_tensors, tensor_leaves
from lockstep.config.enums import CPMethod
from lockstep.errors import LockstepError, UsageError
from lockstep.model.changes import Subclassed
from lockstep.parallel.context.arguments import (
    Masks,
    arguments_on_chunks,
    hidden_states,
    holds_cache,
    sequence_dim,
)
from lockstep.parallel.context.interception import SplitSequence
from lockstep.parallel.context.layout import SequenceLayout
from lockstep.runtime.failure import first_line
from lockstep.torch_internals import autograd as torch_autograd
from lockstep.torch_internals import compile as torch_compile


@dataclass(frozen=True)
class Chain:
    """Blocks that are called one after the other, as those of an encoder or of a decoder."""

    first: str
    last: str


@dataclass
class ContextRegion:
    """The blocks of one model, and where a forward through them stands."""

    layout: SequenceLayout
    method: CPMethod
    chains: dict[str, Chain]
    """Block -> its chain."""
    split: dict[int, Tensor] | None = None
    """Within ``split_sequence``, where the caller splits and gathers: whole tensors, by the id of their chunk."""
    split_dims: dict[int, int] = field(default_factory=dict)
    """Their dims along the sequence."""
    ones: Tensor | None = None
    """The chunk of an attention mask that the caller did not pass: among ``split``, so that it is known as one."""
    split_length: int = 0
    """Positions of each rank within ``split_sequence``."""
    loader_chunks: dict[int, tuple[weakref.ref[Tensor], Tensor]] = field(default_factory=dict)
    """Of the batch that a loader dealt out last: chunk and whole, [batch, sequence, ...], by the id of the chunk."""
    last_by_caller: bool = False
    """Whether the caller did in the last forward, to which backward belongs."""
    whole: bool = False
    """This forward is not split: it has no gradients, and a length or a cache that do not allow it."""
    local_length: int | None = None
    """Positions of each rank, from the first block of a chain to the last; None outside."""
    chain: Chain | None = None
    """The one that is running, or ran last. Of chains whose blocks take turns, the one that began last."""
    begin_of: set[str] = field(default_factory=set)
    end_of: set[str] = field(default_factory=set)
    """Blocks before which the sequence was split in the last forward, and after which it was put together."""
    attentions: int = 0
    is_inside: bool = False
    """Whether a block is running."""
    around: str = ""
    """Class of the module that the blocks are in, where that is not the model."""
    compared: bool = False
    masks: Masks = field(default_factory=Masks)

    def mask_of_ones(self, inputs: Tensor) -> Tensor:
        """Return a mask of ones [batch, length] for chunks of input ids or embeddings, with its whole among
        ``split``."""
        assert self.split is not None
        shape = inputs.shape[:2]
        if self.ones is None or id(self.ones) not in self.split or self.ones.shape != shape:
            self.ones = torch.ones(shape, dtype=torch.int64, device=inputs.device)
            self.split[id(self.ones)] = self.ones.new_ones(shape[0], shape[1] * self.layout.size)
            self.split_dims[id(self.ones)] = 1
        return self.ones

    def begin(self) -> None:
        """Begin a forward of the model. One before it may have failed half-way."""
        self.local_length, self.whole, self.attentions, self.is_inside = None, False, 0, False
        self.chain = None

    @contextmanager
    def on_loader_chunks(self, model: str, args: Args, kwargs: Kwargs) -> Iterator[None]:
        """Split as by ``split_sequence`` for a call with chunks that a loader dealt out.

        Raises:
            UsageError: no argument is one of them, though the call learns, or one is a copy of them.
        """
        if self.split is not None or not any(chunk() is not None for chunk, _ in self.loader_chunks.values()):
            yield
            return
        leaves = list(tensor_leaves((args, kwargs)).values())
        known = self.loader_chunks_among(leaves)
        if not known:
            chunks = [chunk() for chunk, _ in self.loader_chunks.values()]
            if torch.is_grad_enabled() or any(_equal(leaf, chunk) for leaf in leaves for chunk in chunks):
                raise UsageError(
                    f"{model} was called with none of the tensors that the loader gave, which are chunks of the "
                    f"sequence ({self.layout.size} ranks). Pass these tensors unchanged, or evaluate under "
                    "torch.no_grad()."
                )
            yield
            return
        self.split, self.split_dims = known, dict.fromkeys(known, 1)
        self.split_length = next(iter(known.values())).shape[1] // self.layout.size
        try:
            yield
        finally:
            self.split = self.ones = None

    def loader_chunks_among(self, leaves: Iterable[object]) -> dict[int, Tensor]:
        """Whole tensors by the id of their chunk, of the batch that was dealt out last; {}: none is among these."""
        known = {key: whole for key, (chunk, whole) in self.loader_chunks.items() if chunk() is not None}
        return known if any(id(leaf) in known for leaf in leaves) else {}

    def between(self, model: str, error: Exception) -> str:
        """Describe an error between blocks."""
        assert self.chain is not None
        whole = (self.local_length or 0) * self.layout.size
        named = f"blocks={self.around}" if self.around else "blocks=..."
        return (
            f"{model}'s forward raises {type(error).__name__} between its blocks '{self.chain.first}' and "
            f"'{self.chain.last}' ({first_line(error)}): there each rank has {self.local_length} of {whole} "
            f"positions (cp = {self.layout.size}), so tensors from before the first block do not fit. Name with "
            f"{named} modules that run one after the other, with everything that is added between them inside."
        )

    def end(self) -> None:
        """Raise UsageError if forward ended inside the region."""
        if self.local_length is not None:
            assert self.chain is not None
            self.local_length = None
            raise UsageError(
                f"The model's forward called block '{self.chain.first}' but not '{self.chain.last}', after which "
                "the chunks of the ranks are joined. Name with blocks=... only blocks that are always called."
            )


class ContextParallelModel(Subclassed):
    """Mixed into the class of the model itself."""

    _region: ContextRegion

    def __call__(self, *args: object, **kwargs: object) -> object:
        call = super().__call__  # type: ignore[misc]
        region: ContextRegion = self._region
        with region.on_loader_chunks(type(self).__name__, args, kwargs):
            return self._call(region, call, args, kwargs)

    def _call(self, region: ContextRegion, call: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
        region.begin()
        if region.split is not None and hasattr(getattr(self, "config", None), "_attn_implementation"):
            kwargs = arguments_on_chunks(region.split, self, args, kwargs, region.mask_of_ones)
        try:
            output = call(*args, **kwargs)
        except Exception as error:
            # A user's forward may raise anything.
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
    _region: ContextRegion
    _block_name: str
    _argument_names: tuple[str, ...]

    @torch_compile.disable
    def __call__(self, *args: object, **kwargs: object) -> object:
        call = super().__call__  # type: ignore[misc]
        region, name = self._region, self._block_name
        # Activation checkpointing calls blocks again in backward: these calls are as those of the last forward were.
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
        # Not if the call raises: the model's own call then sees that the error came from inside of a block.
        region.is_inside = False
        return _leave_block(region, name, output, hidden.shape[0], length // region.layout.size)

    @torch_compile.disable
    def forward(self, *args: object, **kwargs: object) -> object:
        forward = super().forward  # type: ignore[misc]
        region, name = self._region, self._block_name
        # Generation: each rank computes the whole sequence.
        if region.whole and not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        hidden = hidden_states(name, args, kwargs)
        mode = SplitSequence(name, region.layout, region.method, hidden.shape, region.masks)
        with mode:
            output = forward(*args, **kwargs)
        region.attentions += mode.attentions
        return output


def _equal(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one, other)


def _in_backward() -> bool:
    return torch_autograd.is_in_backward()


def _with_names(names: tuple[str, ...], args: tuple[object, ...]) -> list[tuple[str, object]]:
    return [(names[i] if i < len(names) else f"argument {i}", value) for i, value in enumerate(args)]


class _Splitter:
    """Takes this rank's chunk of each tensor in a block's arguments that runs along the sequence."""

    def __init__(self, block: str, region: ContextRegion, hidden: Tensor, length: int) -> None:
        self.block, self.layout, self.hidden, self.length = block, region.layout, hidden, length

    def __call__(self, name: str, value: object) -> object:
        return map_leaves(lambda _, leaf: self._leaf(name, leaf), value)

    def _leaf(self, name: str, leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf is self.hidden:
            return self.layout.local(leaf, 1) if leaf.shape[1] == self.length else leaf
        dim = sequence_dim(self.block, name, leaf, self.hidden.shape[0], self.length)
        return leaf if dim is None else self.layout.local(leaf, dim)


def _enter(region: ContextRegion, block: str, hidden: Tensor, named: dict[str, object]) -> int | None:
    """Length of the whole sequence; None where this forward is not split.

    In a backward, activation checkpointing of the user's own calls single blocks: nothing is known of their order.
    """
    size, length = region.layout.size, hidden.shape[1]
    repeated = _in_backward()
    chain = region.chains[block]
    if block in region.begin_of if repeated else block == chain.first and region.local_length is None:
        # The first block of a chain splits the sequence, in training always. Without gradients, a length that does
        # not divide, or a cache of keys, is computed whole on each rank.
        cached = next((name for name, value in named.items() if holds_cache(name, value)), None)
        if not torch.is_grad_enabled() and (cached or not region.layout.fits(length)):
            region.whole = True
            return None
        if cached:
            raise UsageError(
                f"Block '{block}' got '{cached}', but with a split sequence a cache would hold only a part of "
                "the keys. Call the model with use_cache=False, or under torch.no_grad()."
            )
        region.layout.check(length, f"The sequence that block '{block}' gets")
        if not region.compared:
            _compare(region, block, hidden)
        region.whole = False
        if not repeated:
            region.local_length, region.attentions, region.chain = length // size, 0, chain
            region.begin_of.add(block)
        return length
    if region.whole and not torch.is_grad_enabled():
        return None
    # Between the first and the last block of a chain, each rank has its chunk, and blocks must hand on chunks.
    if not repeated and region.local_length != length:
        if region.local_length is None or region.chain is None:
            raise UsageError(
                f"Block '{block}' was called before '{chain.first}', where the sequence is split. Call the "
                "blocks in their order, or name with blocks=... those that are called in order."
            )
        raise UsageError(
            f"Block '{block}' got {length} positions, but after '{region.chain.first}' each rank has "
            f"{region.local_length}. Blocks must keep the length, and run one after the other: name such blocks with "
            "blocks=..."
        )
    # A chain that begins inside another one finds the sequence split.
    if not repeated and block == chain.first:
        region.chain = chain
        region.begin_of.discard(block)
    # The block gets a chunk, so the whole is ``size`` times as long.
    return length * size


def _leave_block(region: ContextRegion, block: str, output: object, batch: int, local_length: int) -> object:
    tensors = list(tensor_leaves(output).values())
    if not tensors or tensors[0].shape[:2] != (batch, local_length):
        found = f"{list(tensors[0].shape)}" if tensors else "no tensor"
        raise UsageError(
            f"Block '{block}' got hidden states of {batch} samples and {local_length} positions, but returned "
            f"{found}. Context parallelism needs blocks that keep batch and length. Name such blocks with "
            "blocks=..."
        )
    chain = region.chain
    if _in_backward():
        # A block that is repeated gathers where it did in the forward.
        if block not in region.end_of:
            return output
    elif chain is None or block != chain.last:
        region.end_of.discard(block)
        return output
    else:
        region.local_length = None
        region.end_of.add(block)
        if not region.attentions:
            raise UsageError(
                f"No block from '{chain.first}' to '{chain.last}' called F.scaled_dot_product_attention, so no "
                f"part of the model would see the whole sequence (cp = {region.layout.size}). Use it in the "
                "model, name the blocks that use it with blocks=..., or leave cp out."
            )

    def gather(tensor: Tensor) -> Tensor:
        runs_along = tensor.ndim > 1 and tensor.shape[:2] == (batch, local_length)
        return region.layout.gather(tensor, 1) if runs_along else tensor

    return map_tensors(gather, output)


def _compare(region: ContextRegion, block: str, hidden: Tensor) -> None:
    """Raise UsageError if the ranks' hidden states have different shapes, so they come from different batches."""
    region.compared = True
    shape = torch.tensor(hidden.shape, dtype=torch.int64, device=hidden.device)
    shapes = [tuple(row) for row in region.layout.collect(shape).tolist()]
    if len(set(shapes)) > 1:
        raise UsageError(
            f"The ranks that share a sequence (cp = {region.layout.size}) entered block '{block}' with hidden "
            f"states of shapes {shapes}. Give all of them the same batch: pass the loader to prepare()."
        )


def regions_of(model: nn.Module) -> list[ContextRegion]:
    """Return the regions in ``model``, of which each has one."""
    found = {id(m._region): m._region for m in model.modules() if isinstance(m, ContextParallelBlock)}
    return list(found.values())
