"""Activation checkpointing: a block's activations are computed again in backward instead of being kept.

With L blocks, each with an input of x bytes, ``full`` keeps L·x bytes and computes every block's forward
twice; ``selective`` also keeps the results of matrix products and attention and repeats the rest;
``offload`` is ``full`` with the inputs in host memory.

References: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; Korthikanti et al., Reducing
Activation Recomputation in Large Transformer Models, MLSys 2023 (selective).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lockstep.comm.tree import map_leaves, map_tensors
from lockstep.config.enums import Activation
from lockstep.errors import UsageError
from lockstep.model.changes import Subclassed, disable_cache, subclass
from lockstep.offload.activations import HostActivations
from lockstep.torch_internals import dispatch
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals import tensors as torch_tensors


def apply_activation_checkpointing(
    model: nn.Module, mode: Activation, blocks: dict[str, nn.Module]
) -> nn.Module:
    """Keep only a part of each block's activations for backward, in place.

    A block gets a subclass of its own class of the same name, whose ``forward`` checkpoints (as
    ``fully_shard`` does; hooks stay outside of it). ``isinstance``, names and ``state_dict`` keys stay.
    Losses and gradients do not change: random numbers are drawn again as they were, and buffers that a
    forward changes (running statistics) are changed once. In eval mode and without gradients a block runs
    as before. Apply before ``compile`` and ``fully_shard``.

    - ``FULL``: a block's inputs are kept. A transformers model whose own checkpointing covers exactly these
      blocks does it itself.
    - ``SELECTIVE``: also the results of matrix products, convolutions, and attention without dropout. A graph
      serves one backward, also with ``retain_graph``.
    - ``OFFLOAD``: as ``FULL``; inputs on an accelerator that require a gradient are copied to pinned host
      memory while the block computes, and come back while the block after it does in backward. Others, which
      blocks often share (masks, positions), stay where they are. On the CPU it is ``FULL``.

    Other state that a forward changes, such as attributes, changes again in backward. A compiled block with
    running statistics can be called once before each backward: torch refuses a second call.

    Raises:
        UsageError: no blocks, or a model whose activations are recomputed already.
    """
    if mode is Activation.NONE:
        return model
    if not blocks:
        raise UsageError(
            f"activation={mode} works on blocks, but no blocks of {type(model).__name__} were found. Name them "
            "with blocks=..., as a class or as a pattern such as 'layers.*'."
        )
    for name, module in model.named_modules():
        if isinstance(module, RecomputedForward) or getattr(module, "gradient_checkpointing", False) is True:
            raise UsageError(
                f"activation={mode}, but {type(model).__name__} recomputes activations already (in "
                f"'{name or 'the model itself'}'). Use only one of the two: activation={mode}, or the model's "
                "own gradient_checkpointing_enable()."
            )
    for name, block in blocks.items():
        if "forward" in vars(block):
            raise UsageError(
                f"The block '{name}' has a forward as an attribute, which hides the one of its class "
                f"{type(block).__name__}, so activation={mode} would not reach it. Change forward in a subclass, "
                "or set it after prepare()."
            )
    disable_cache(model, "recomputing activations would append keys and values again")
    if mode is Activation.FULL and _checkpoints_itself(model, blocks):
        enable = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})  # type: ignore[operator]
        return model
    around = HostActivations() if mode is Activation.OFFLOAD else nullcontext()
    classes: dict[type, type] = {}
    for block in blocks.values():
        cls = type(block)
        if cls not in classes:
            classes[cls] = subclass(cls, RecomputedForward, _recompute_mode=mode, _around=around)
        block.__class__ = classes[cls]
    return model


# -- a block ---------------------------------------------------------------------------------------------


class RecomputedForward(Subclassed):
    """Mixed into a block's class by ``recompute``. What is loaded from a pickle keeps its activations."""

    _attributes = ("_changed_buffers",)
    _recompute_mode: Activation
    # Entered for each call; of all blocks of a model.
    _around: AbstractContextManager[object]
    _changed_buffers: set[str]
    training: bool

    def forward(self, *args: object, **kwargs: Any) -> object:
        forward = super().forward  # type: ignore[misc]
        if not (self.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        # The compiler recomputes, and makes changes of buffers once.
        if torch.compiler.is_compiling():
            selective = self._recompute_mode is Activation.SELECTIVE
            kept: Any = {"context_fn": _selective_contexts} if selective else {}
            return checkpoint(forward, *args, use_reentrant=False, **kept, **kwargs)
        return _checkpointed(self, forward, args, kwargs)


def _checkpointed(
    block: Any, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    buffers = BuffersOnce(block)
    contexts: tuple[AbstractContextManager[object], AbstractContextManager[object]] = nullcontext(), buffers
    if block._recompute_mode is Activation.SELECTIVE:
        first, second = _selective_contexts()
        contexts = first, _NestedContexts(buffers, second)
        forward = _without_autocast_cache(forward)
    run, tensors = _function_of_tensors(forward, args, kwargs)
    # For what ``checkpoint`` itself saves: within the block its own hooks are in force.
    with block._around:
        outputs = checkpoint(run, *tensors, use_reentrant=False, context_fn=lambda: contexts)
    buffers.forget_unchanged()
    return outputs


def _function_of_tensors(
    forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[Callable[..., object], list[torch.Tensor]]:
    """Return ``forward`` as a function of all tensors in its arguments, and these.

    ``checkpoint`` takes care of tensors only where they are positional: it stores the generator of their
    device and lets hooks move them. Containers are stored as they are now, and the caller's own go to the
    first call alone, so that what a block appends to them is there once.
    """
    tensors: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> _TensorIndex:
        tensors.append(tensor)
        return _TensorIndex(len(tensors) - 1)

    stored = map_tensors(take, (args, kwargs))
    given = [(args, kwargs)]

    def run(*values: torch.Tensor) -> object:
        def put_back(_: str, leaf: object) -> object:
            return values[leaf.index] if isinstance(leaf, _TensorIndex) else leaf

        # The first call takes the caller's own containers, each later one copies.
        positional, named = given.pop() if given else map_leaves(put_back, stored)
        return forward(*positional, **named)

    return run, tensors


class _TensorIndex:
    """Stands where a tensor was."""

    def __init__(self, index: int) -> None:
        self.index = index


class _NestedContexts:
    """Two contexts as one that can be entered again: a kept graph is recomputed for every backward."""

    def __init__(self, outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> None:
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.inner.__exit__(kind, error, trace)
        self.outer.__exit__(kind, error, trace)


# -- what is kept ----------------------------------------------------------------------------------------

_KEPT = frozenset(
    [
        *dispatch.operators_of(dispatch.PRODUCTS),
        *filter(None, [getattr(torch.ops.higher_order, "flex_attention", None)]),
    ]
)


def _policy(_: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    packet = getattr(operator, "overloadpacket", operator)
    if packet in _KEPT and not _drops(operator, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _drops(operator: object, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Return whether it applies dropout: skipping it would give the operators after it other random numbers."""
    schema = dispatch.schema_of(operator)
    for index, argument in enumerate(schema.arguments if schema else ()):
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given)
    return False


_selective_contexts = functools.partial(create_selective_checkpoint_contexts, _policy)


def _without_autocast_cache(forward: Callable[..., object]) -> Callable[..., object]:
    """Kept results are found by their number: both times a weight must be cast, or both times not."""

    def run(*args: object, **kwargs: object) -> object:
        enabled = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return forward(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(enabled)

    return run


# -- transformers ----------------------------------------------------------------------------------------


def _checkpoints_itself(model: nn.Module, blocks: dict[str, nn.Module]) -> bool:
    if not getattr(model, "supports_gradient_checkpointing", False):
        return False
    if not hasattr(model, "gradient_checkpointing_enable"):
        return False
    # Of its layers the class has the flag; models and attentions may have one of their own, as an attribute.
    layers = {id(module) for module in model.modules() if hasattr(type(module), "gradient_checkpointing")}
    return layers == set(map(id, blocks.values()))


class BuffersOnce:
    """Inside this context, those buffers that a forward changes are copies, as they were before the forward.

    Which ones these are is learned: the first forward copies all, later ones those that changed before. One
    that changes for the first time later on is not seen as it was, but is not changed twice either.
    """

    def __init__(self, block: Any) -> None:
        self.block = block
        known: set[str] | None = getattr(block, "_changed_buffers", None)
        self.before: dict[str, torch.Tensor] = dict(block.named_buffers(remove_duplicate=False))
        self.versions = {name: _version(tensor) for name, tensor in self.before.items()}
        self.copies = {
            name: tensor.detach().clone()
            for name, tensor in self.before.items()
            if known is None or name in known
        }

    def forget_unchanged(self) -> None:
        if not self.before:
            return
        # Nothing holds the buffers any longer than it must: a graph may live until the end of a window.
        known: set[str] = getattr(self.block, "_changed_buffers", set()) | self._changed()
        self.block._changed_buffers = known
        self.copies = {name: kept for name, kept in self.copies.items() if name in known}
        self.before = {}

    def _changed(self) -> set[str]:
        changed = set()
        for path, module in self.block.named_modules():
            # Running statistics change without a new version.
            certain = getattr(module, "track_running_stats", False)
            for key, tensor in module.named_buffers(prefix=path, recurse=False):
                # Another object, or the same one written to.
                same = self.before.get(key) is tensor and self.versions[key] == _version(tensor)
                if certain or not same:
                    changed.add(key)
        return changed

    def __enter__(self) -> None:
        names = getattr(self.block, "_changed_buffers", ())
        self.current = {name: self.block.get_buffer(name) for name in names}
        for name, tensor in self.current.items():
            self._set_buffer(name, self.copies.get(name, tensor).detach().clone())

    def __exit__(self, *error: object) -> None:
        for name, tensor in self.current.items():
            self._set_buffer(name, tensor)
        self.current = {}

    def _set_buffer(self, name: str, tensor: torch.Tensor) -> None:
        path, _, key = name.rpartition(".")
        torch_modules.buffers_of(self.block.get_submodule(path))[key] = tensor


def _version(tensor: Any) -> int:
    return 0 if tensor.is_inference() else torch_tensors.version(tensor)
