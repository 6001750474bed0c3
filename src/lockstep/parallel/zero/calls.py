"""Calls of a sharded model that do not begin with the model itself: ``model.generate(ids)``, ``model.encoder(x)``.

torch gathers the weights outside of blocks when the model is called. Other methods of it, and modules inside of it
that are called by themselves, would meet shards. So they run as its ``forward`` does: from the first such call to its
end these weights are gathered, and what it returns takes part in backward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.torch_internals import fsdp2
from lockstep.torch_internals.autograd import current_backward as current_pass
from lockstep.torch_internals.fsdp2_backward import is_compiled


class OtherCalls:
    """Belongs to one sharded model.

    Only modules around and beside blocks are watched: one that is inside of a block is not called by itself.

    Args:
        groups: The modules that ``fully_shard`` was applied to; the first is the model itself.
        before: Called before each such call.
        after: Called after it with what it has returned, None if it raised.
    """

    def __init__(
        self, groups: list[Any], before: Callable[[], None], after: Callable[[object], None]
    ) -> None:
        self._root = groups[0]
        self._before = before
        self._after = after
        self._entered: nn.Module | None = None
        if not fsdp2.param_groups(self._root) or is_compiled(self._root):
            return
        self._names = {name for name, _ in self._root.named_parameters()}
        blocks = set(groups[1:])
        for module in _outside(self._root, blocks):
            module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._leave, always_call=True)
        for name, method in _methods(type(self._root)):
            setattr(self._root, name, self._as_forward(name, method))

    @property
    def is_open(self) -> bool:
        """Whether such a call is running."""
        return self._entered is not None

    def _is_inside(self) -> bool:
        """Whether this call is a part of another one, or of a backward that computes again."""
        return self.is_open or fsdp2.is_in_forward(self._root) or current_pass() != -1

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._is_inside() or torch.compiler.is_compiling():
            return None
        self._before()
        self._entered = module
        return fsdp2.pre_forward(self._root, module, args, kwargs)

    def _leave(self, module: nn.Module, args: object, output: object) -> object:
        if self._entered is not module:
            return None
        if output is None:  # it has raised
            self._entered = None
            self._after(None)
            return None
        return self._end(args, output)

    def _end(self, args: object, output: object) -> object:
        try:
            return fsdp2.post_forward(self._root, self._root, args, output)
        finally:
            self._entered = None
            self._after(output)

    def _as_forward(self, name: str, method: Any) -> Callable[..., Any]:
        """``method`` of the model, which runs as ``forward`` if it is called with tensors."""
        bound = method.__get__(self._root)

        @functools.wraps(bound)
        def call(*args: Any, **kwargs: Any) -> Any:
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

    def _computes(self, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        """Whether tensors are passed, or containers of them: inputs, not weights of the model."""
        return any(self._is_input(value) for value in (*args, *kwargs.values()))

    def _is_input(self, value: object) -> bool:
        if isinstance(value, Mapping):
            return any(isinstance(one, torch.Tensor) for one in value.values()) and self._names.isdisjoint(
                value
            )
        if isinstance(value, (list, tuple)):
            return any(isinstance(one, torch.Tensor) for one in value)
        return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)

    def _explained(self, name: str, bound: Any, args: Any, kwargs: Any) -> Any:
        try:
            return bound(*args, **kwargs)
        except RuntimeError as error:
            kind = type(self._root).__name__.removeprefix("FSDP")
            if "invalid python storage" in str(error):  # safetensors' way of saying that it was given a shard
                raise UsageError(
                    f"{kind}.{name}() would save shards. Pass it the whole weights, which all ranks gather together: "
                    "state_dict=accelerator.get_state_dict(model)."
                ) from error
            if "mixed torch.Tensor and DTensor" not in str(error) or isinstance(error, UsageError):
                raise
            raise UsageError(
                f"{kind}.{name}() computes with weights that are sharded, and was called without a tensor, so that "
                "they were not gathered for it. Pass it a tensor, or call once after prepare: "
                f"torch.distributed.fsdp.register_fsdp_forward_method(model, '{name}')"
            ) from error


def _outside(root: nn.Module, blocks: set[nn.Module]) -> Iterator[nn.Module]:
    """The modules inside of ``root`` that have weights of its own group in them: around and beside ``blocks``."""
    for child in root.children():
        if child not in blocks:
            if _has_own(child, blocks):
                yield child
            yield from _outside(child, blocks)


def _has_own(module: nn.Module, blocks: set[nn.Module]) -> bool:
    return next(module.parameters(recurse=False), None) is not None or any(
        child not in blocks and _has_own(child, blocks) for child in module.children()
    )


def _methods(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods that a user's class adds to ``nn.Module``."""
    for name in dir(cls):
        if name.startswith("_") or hasattr(nn.Module, name):
            continue
        method = inspect.getattr_static(cls, name)
        if inspect.isfunction(method) and not (method.__module__ or "").startswith("torch."):
            yield name, method
