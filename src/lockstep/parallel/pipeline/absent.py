"""Placeholders for what a rank does not hold: tensors with a shape but no values, and modules made of them.

The user's ``forward`` runs on every stage. What it computes from placeholders is a placeholder again and takes no
memory; what it computes from inputs and buffers alone is real.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.comm.tree import leaves, map_leaves
from lockstep.errors import UsageError
from lockstep.model.changes import attributes_set
from lockstep.model.contents import copy_of
from lockstep.parallel.pipeline.traced import repeated
from lockstep.torch_internals import dispatch, dtensor
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals.fake import FakeTensor, FakeTensorMode, emptied

_CARRIED = "_lockstep_carried"
_MISSING = object()
ModuleEntry = tuple[dict[str, Any], str]
"""(dict, key) of an entry, such as that of a module in its parent."""
Change = tuple[dict[str, object], str, object]
"""(dict, key, value) of an entry that is changed while a stage runs."""


class _PlaceholderMode(FakeTensorMode):
    """Computes without values. Outside of a call of the model, a change that would be lost is refused."""

    in_call = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.in_call and dispatch.schema_of(func).is_mutable:
            tensors = [leaf for leaf in leaves((args, kwargs or {})).values() if isinstance(leaf, Tensor)]
            if {isinstance(one, FakeTensor) for one in tensors} == {True, False}:
                raise UsageError(
                    f"{dispatch.operation_name(func)} meets a weight of a block of this rank and one of a block "
                    "on another rank of the pipeline, which has no values here. Change the weights before prepare(), "
                    "or each block by its own values alone."
                )
        return super().__torch_dispatch__(func, types, args, kwargs)


class PlaceholderTensors:
    """Makes tensors without values on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._mode = _PlaceholderMode(allow_non_fake_inputs=True)
        self._device = device

    def in_call(self) -> AbstractContextManager[None]:
        """Let a forward change tensors by placeholders inside: what it leaves is looked at afterwards."""
        return attributes_set(self._mode, in_call=True)

    def without_values(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` without its values."""
        return emptied(self._mode, tensor)

    def like(self, tensor: Tensor, floating: torch.dtype | None = None) -> Tensor:
        """Return a new placeholder of the same shape, strides and ``requires_grad``, and of the same dtype.

        ``floating``: the dtype that takes the place of one of floating-point numbers.
        """
        dtype = floating if floating is not None and tensor.is_floating_point() else tensor.dtype
        with self._mode:
            new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=self._device)
        return new.requires_grad_(tensor.requires_grad)


def is_placeholder(value: object) -> bool:
    """Return whether ``value`` is a tensor without values."""
    if isinstance(value, DTensor):
        value = dtensor.local_tensor(value)
    return isinstance(value, FakeTensor)


def check_values(gradients: Iterable[Tensor | None]) -> None:
    """Raise UsageError if one of what a loss hands to its backward has no values."""
    if any(is_placeholder(gradient) for gradient in gradients):
        raise UsageError(
            "The loss was computed with a weight or an attribute of a block that is on another rank of the pipeline, "
            "so this rank has no values of it. Add such a term inside of the model's forward, or pass "
            "weight_decay to the optimizer instead of a penalty on weights."
        )


def attach_value(placeholder: Tensor, value: Tensor) -> None:
    """Note the real tensor for which ``placeholder`` stands on this stage."""
    setattr(placeholder, _CARRIED, value)


def carried(value: object) -> Any:
    """Return the real tensor for which ``value`` stands, if there is one, else ``value``."""
    return getattr(value, _CARRIED, value) if isinstance(value, Tensor) else value


class ReplacementModule(nn.Module):
    """Takes the place of a module in calls; its attributes are still to be found, and are set in the module."""

    replaced: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # What subclasses keep themselves.
        self._own = ("received", "keep", "paths")
        torch_modules.children_of(self)["replaced"] = module

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(torch_modules.children_of(self)["replaced"], name)

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        if name.startswith("_") or name == "training" or name in self._own:
            super().__setattr__(name, value)
        else:
            setattr(torch_modules.children_of(self)["replaced"], name, value)


class AbsentBlock(ReplacementModule):
    """Takes the place of a block of another stage. Has the attributes of a copy of it, without values of tensors."""

    def __init__(self, name: str, copy: nn.Module) -> None:
        super().__init__(copy)
        self._name = name
        # No child: the block has no modules or parameters here.
        torch_modules.children_of(self).clear()
        self.__dict__["_copy"] = copy

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        copy = self.__dict__.get("_copy")
        return super().__getattr__(name) if copy is None else getattr(copy, name)

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        copy = self.__dict__.get("_copy")
        if copy is None or name.startswith("_") or name == "training":
            nn.Module.__setattr__(self, name, value)
        else:
            setattr(copy, name, value)

    def __getitem__(self, index: object) -> nn.Module:
        # Python looks for it in the class. Iteration ends at its IndexError.
        return self.__dict__["_copy"][index]

    def forward(self, *args: object, **kwargs: object) -> object:
        raise UsageError(
            f"The block '{self._name}' is on another rank of the pipeline, and was called outside of a forward of "
            "the whole model. Call the model that was prepared."
        )


# Not an Exception, so that no handler in the user's forward takes it.
class StageLeft(BaseException):
    """A stage's forward is over: the call of the next stage's first block, ``call``, was reached."""

    def __init__(self, call: object) -> None:
        self.call = call


class BoundaryBlock(AbsentBlock):
    """The first block of the next stage: this one's forward ends where it is called."""

    def forward(self, *args: object, **kwargs: object) -> object:
        raise StageLeft((args, kwargs))


class ReplayedBlock(AbsentBlock):
    """A block of an earlier stage: returns placeholders of what it returned when the model was traced."""

    def __init__(self, name: str, block: nn.Module, result: object) -> None:
        super().__init__(name, block)
        self._result = result

    def forward(self, *args: object, **kwargs: object) -> object:
        # New ones each time: the value that one carries is of one micro-batch.
        return repeated(self._result, leaves((args, kwargs)), Tensor.detach)


class ReplayedModule(ReplacementModule):
    """A module outside of blocks that an earlier stage calls: returns placeholders of what it gave in the trace."""

    def __init__(self, module: nn.Module, result: object) -> None:
        super().__init__(module)
        self._result = result

    def forward(self, *args: object, **kwargs: object) -> object:
        return map_leaves(lambda _, leaf: leaf.detach(), self._result)


@contextmanager
def changed(changes: list[Change]) -> Iterator[None]:
    """Give the entries other values inside."""
    before = [(entries, key, entries.get(key, _MISSING)) for entries, key, _ in changes]
    for entries, key, value in changes:
        entries[key] = value
    try:
        yield
    finally:
        for entries, key, value in before:
            if value is _MISSING:
                del entries[key]
            else:
                entries[key] = value


def copy_without_values(module: nn.Module, memo: dict[int, object], keep_buffers: bool) -> nn.Module:
    """Return a copy of ``module`` whose parameters are plain attributes, and those of ``memo``: id -> placeholder.

    ``keep_buffers``: buffers are copied with their values, as plain attributes; else they are as in ``memo``.
    """
    new = copy_of(module, memo)
    for inner in new.modules():
        _attributes_instead(inner, torch_modules.parameters_of(inner))
        if keep_buffers:
            _attributes_instead(inner, torch_modules.buffers_of(inner))
    return new


def _attributes_instead(module: nn.Module, registered: dict[str, object]) -> None:
    for name, value in list(registered.items()):
        if value is not None:
            del registered[name]
            module.__dict__[name] = value


def slots(model: nn.Module, module: nn.Module) -> Iterator[ModuleEntry]:
    """Yield (dict, key) of each place in ``model`` where ``module`` is registered."""
    for parent in model.modules():
        for key, child in torch_modules.children_of(parent).items():
            if child is module:
                yield torch_modules.children_of(parent), key
