"""Forwards of a sharded model that torch's own hooks, which gather its weights, do not see as they should.

- *Other calls*: ``model.generate(ids)``, ``model.encoder(x)``. torch gathers the weights outside of blocks when the
  model is called. Other methods of it, and modules inside of it that are called by themselves, would meet shards. So
  they run as its ``forward`` does: from the first such call to its end these weights are gathered, and what it returns
  takes part in backward.
- *Skipped blocks*: layers dropped at random, experts or branches chosen in Python. Blocks are gathered, and their
  gradients reduced, as they come, so that all ranks must come to the same blocks in the same order: otherwise one
  rank's shard of a block meets another rank's shard of another one. So a block that this rank leaves out is passed
  through: its weights are gathered and let go, forward and backward, while its input goes on as it is, and its
  gradients count as zeros. That is done for models whose forward comes to its blocks in the order in which they stand
  in the model. The first forward that comes to one again, or to an earlier one, ends it for that model.
- *Views*: torch gathers a module's weights for backward in a hook of what the module has returned. Of a view
  (``x.flatten(1)``, ``x[:, 0]``) the hook is lost when the caller changes it in place (``h += y``), and backward then
  computes without these weights; torch warns of it in each process. Here a view is returned as a tensor of its own, in
  the same memory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType

import torch
from torch import nn

from lockstep.comm.tree import Args, Kwargs, leaves, map_leaves, tensor_leaves
from lockstep.errors import UsageError
from lockstep.parallel.save_pretrained import saved
from lockstep.torch_internals import fsdp2
from lockstep.torch_internals.autograd import FunctionContext
from lockstep.torch_internals.autograd import current_backward as current_pass
from lockstep.torch_internals.fsdp2_backward import is_compiled
from lockstep.torch_internals.fsdp2_gathered import ShardedModule
from lockstep.torch_internals.tensors import is_view


class OtherCalls:
    """Belongs to one sharded model.

    Only modules around and beside blocks are watched: one that is inside of a block is not called by itself.

    Args:
        groups: The modules that ``fully_shard`` was applied to; the first is the model itself.
        before: Called before each such call.
        after: Called after it with what it has returned, None if it raised.
        are_whole: Whether weights are gathered anyway, so that nothing is to be done.
        end_blocks: Called when such a call has returned, before torch's own hook.
    """

    def __init__(
        self,
        groups: list[ShardedModule],
        before: Callable[[], None],
        after: Callable[[object], None],
        are_whole: Callable[[], bool],
        end_blocks: Callable[[], None],
    ) -> None:
        self._root = groups[0]
        self._end_blocks = end_blocks
        self._are_whole = are_whole
        self._before = before
        self._after = after
        self._entered: nn.Module | None = None
        self._is_in_forward = False
        if not fsdp2.param_groups(self._root) or is_compiled(self._root):
            return
        self._names = {name for name, _ in self._root.named_parameters()}
        blocks = set(groups[1:])
        for module in _outside(self._root, blocks):
            module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._leave, always_call=True)
        for name, method in _methods(type(self._root)):
            setattr(self._root, name, self._as_forward(name, method))
        self._root.forward = self._forward_by_name()

    @property
    def is_open(self) -> bool:
        """Whether such a call is running."""
        return self._entered is not None

    def forward_begins(self) -> None:
        """Begin the forward of the whole model: calls of other methods and modules are parts of it."""
        self._is_in_forward = True

    def forward_ends(self) -> None:
        """Note that it has returned or raised."""
        self._is_in_forward = False

    def _is_inside(self) -> bool:
        """Return whether this call is a part of another one, or of a backward that computes again, or finds whole
        weights."""
        return (
            self._is_in_forward
            or self.is_open
            or self._are_whole()
            or fsdp2.is_in_forward(self._root)
            or current_pass() != -1
        )

    def _enter(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        # The first is asked by itself because it is so for nearly every call, of each module in each forward.
        if self._is_in_forward or self._is_inside() or torch.compiler.is_compiling():
            return None
        self._before()
        self._entered = module
        return fsdp2.pre_forward(self._root, module, args, kwargs)

    def _leave(self, module: nn.Module, args: object, output: object) -> object:
        if self._entered is not module:
            return None
        # It has raised.
        if output is None:
            self._entered = None
            self._after(None)
            return None
        return self._end(args, output)

    def _end(self, args: object, output: object) -> object:
        try:
            self._end_blocks()
            return fsdp2.post_forward(self._root, self._root, args, output)
        finally:
            self._entered = None
            self._after(output)

    def _as_forward(self, name: str, method: FunctionType) -> Callable[..., object]:
        """Run ``method`` of the model, which runs as ``forward`` if it is called with tensors."""
        bound = method.__get__(self._root)

        @functools.wraps(bound)
        def call(*args: object, **kwargs: object) -> object:
            # Parts of a call that is gathered for already, among them all methods that ``forward`` itself calls.
            if self._is_inside():
                return bound(*args, **kwargs)
            if not self._computes(args, kwargs):
                return self._explained(name, bound, args, kwargs)
            self._before()
            self._entered = self._root
            args, kwargs = fsdp2.pre_forward(self._root, self._root, args, kwargs)
            try:
                output = bound(*args, **kwargs)
            except BaseException:
                self._entered = None
                self._after(None)
                raise
            return self._end(args, output)

        return call

    def _forward_by_name(self) -> Callable[..., object]:
        """Run ``model.forward(x)`` as ``model(x)``."""
        root, own = self._root, vars(self._root).get("forward")

        @functools.wraps(own or root.forward)
        def forward(*args: object, **kwargs: object) -> object:
            if not self._is_inside():
                return root(*args, **kwargs)
            # That of the class as it is now: a later step of ``prepare`` may have changed it.
            return own(*args, **kwargs) if own else type(root).forward(root, *args, **kwargs)

        return forward

    def _computes(self, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        """Return whether tensors are passed, or containers of them: inputs, not weights of the model."""
        return any(self._is_input(value) for value in (*args, *kwargs.values()))

    def _is_input(self, value: object) -> bool:
        if isinstance(value, Mapping):
            return any(isinstance(one, torch.Tensor) for one in value.values()) and self._names.isdisjoint(
                value
            )
        if isinstance(value, (list, tuple)):
            return any(isinstance(one, torch.Tensor) for one in value)
        return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)

    def _explained(self, name: str, bound: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
        kind = type(self._root).__name__.removeprefix("FSDP")
        try:
            return saved(kind, name, bound, args, kwargs)
        except RuntimeError as error:
            cause = error.__cause__ if isinstance(error, UsageError) else error
            if "mixed torch.Tensor and DTensor" not in str(cause):
                raise
            raise UsageError(
                f"{kind}.{name}() computes with sharded weights, but was called without a tensor, so these "
                "weights were not gathered for it. Pass it a tensor, or call once after prepare(): "
                f"torch.distributed.fsdp.register_fsdp_forward_method(model, '{name}')"
            ) from error


def _outside(root: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    """Return the modules in ``root`` that have weights of its own group in them: around and beside ``blocks``."""
    for child in root.children():
        if child not in blocks:
            if _has_own(child, blocks):
                yield child
            # A block inside of a block is not reached: nobody looks into blocks.
            yield from _outside(child, blocks)


def _has_own(module: nn.Module, blocks: set[nn.Module]) -> bool:
    return next(module.parameters(recurse=False), None) is not None or any(
        child not in blocks and _has_own(child, blocks) for child in module.children()
    )


def _methods(cls: type) -> Iterator[tuple[str, FunctionType]]:
    """Public methods that a user's class adds to ``nn.Module``."""
    for name in dir(cls):
        if name.startswith("_") or hasattr(nn.Module, name):
            continue
        method = inspect.getattr_static(cls, name)
        if inspect.isfunction(method) and not (method.__module__ or "").startswith("torch."):
            yield name, method


class SkippedBlocks:
    """Belongs to one sharded model.

    Args:
        blocks: The modules inside of the model that are gathered by themselves, in the order of the model.
        passed: Called with each block that was passed through.
        call_empty: Passes values by a block, whose weights are gathered meanwhile.
    """

    def __init__(
        self,
        blocks: list[ShardedModule],
        passed: Callable[[object], None],
        call_empty: Callable[[ShardedModule, object, Callable[[object], object]], object],
    ) -> None:
        self._blocks = blocks
        self._passed = passed
        self._call_empty = call_empty
        self._is_in_forward = False
        self._next = 0
        nested = any(
            inner is not block and inner in set(blocks) for block in blocks for inner in block.modules()
        )
        # A compiled module runs its hooks inside of what was compiled, where nothing can be counted.
        compiled = any(is_compiled(block) for block in blocks)
        self._is_ordered = not (nested or compiled)
        if self._is_ordered:
            for number, block in enumerate(blocks):
                block.register_forward_pre_hook(
                    partial(self._comes_to, number), prepend=True, with_kwargs=True
                )

    def forward_begins(self) -> None:
        """Begin the forward of the whole model."""
        # Not where a backward computes a forward again: that one comes to some blocks only.
        self._is_in_forward = self._is_ordered and torch.is_grad_enabled() and current_pass() == -1
        self._next = 0

    def forward_ends(self, module: nn.Module, args: object, output: object) -> object:
        """Run as a forward hook of the whole model, before torch's: pass through the blocks that are left."""
        if not self._is_in_forward:
            return None
        # Every rank passes all blocks in each forward, so that its gathers match those of the others.
        left = range(self._next, len(self._blocks))
        self._next = len(self._blocks)
        return self._pass_through(left, output) if left else None

    def leave(self) -> None:
        """Note that the forward is over, or has raised."""
        self._is_in_forward = False

    def _comes_to(self, number: int, module: nn.Module, args: object, kwargs: object) -> object:
        if not self._is_in_forward or current_pass() != -1:
            return None
        # It was called or passed through before, so this model's forward has no fixed order.
        if number < self._next:
            self._is_ordered = self._is_in_forward = False
            return None
        left_out = range(self._next, number)
        self._next = number + 1
        return self._pass_through(left_out, (args, kwargs)) if left_out else None

    def _pass_through(self, numbers: range, values: object) -> object:
        """Pass ``values`` on, so that their gradients come by these blocks."""
        # Gradients reach the blocks that were left out along one tensor, which must be able to have one.
        carrier = _carrier(values)
        if carrier is None:
            self._is_ordered = self._is_in_forward = False
            return None
        for number in numbers:
            block = self._blocks[number]
            values = self._call_empty(block, values, partial(_connect, block, carrier))
            self._passed(block)
        return values


def _carrier(values: object) -> str | None:
    """Return the path of the tensor that gradients go along."""
    found = {path: leaf for path, leaf in tensor_leaves(values).items() if leaf.is_floating_point()}
    # One with a gradient first: only along that does backward come to the blocks before.
    return next((path for path, leaf in found.items() if leaf.requires_grad), next(iter(found), None))


def _connect(block: nn.Module, carrier: str, values: object) -> object:
    """Let the carrier require a gradient where what the block returns would: if it has trainable weights."""
    wholes = (fsdp2.unsharded_param(p) for group in fsdp2.param_groups(block) for p in fsdp2.params(group))
    weight = next((whole for whole in wholes if whole is not None and whole.requires_grad), None)
    if weight is None or not torch.is_grad_enabled():
        return values
    return map_leaves(lambda path, leaf: _Along.apply(weight, leaf) if path == carrier else leaf, values)


class _Along(torch.autograd.Function):
    """The same numbers in the same memory; no gradient for the weight."""

    @staticmethod
    def forward(ctx: FunctionContext, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: FunctionContext, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient


def without_views(module: nn.Module, args: object, output: object) -> object:
    """Return, as a forward hook, the output, in which no tensor with a gradient is a view."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if isinstance(output, torch.Tensor):
        return _NewTensor.apply(output) if _is_view(output) else None
    # Most outputs have no views, and containers of them are not built again then.
    if not any(_is_view(leaf) for leaf in leaves(output).values()):
        return None
    return map_leaves(lambda _, leaf: _NewTensor.apply(leaf) if _is_view(leaf) else leaf, output)


def _is_view(leaf: object) -> bool:
    return type(leaf) is torch.Tensor and leaf.requires_grad and is_view(leaf)


class _NewTensor(torch.autograd.Function):
    """The same numbers in the same memory, as a tensor that is no view."""

    @staticmethod
    def forward(ctx: FunctionContext, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: FunctionContext, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
