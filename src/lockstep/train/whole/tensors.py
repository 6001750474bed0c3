"""Whole tensors in the place of sharded ones: gathered before a step, cut again after it."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.comm.dtensor import full, is_dtensor, local, regions_of, shard_like
from lockstep.comm.tree import StateDict
from lockstep.errors import UsageError
from lockstep.torch_internals.replaced_parameters import revive
from lockstep.torch_internals.tensors import storage_key, version


class Storages:
    """Which parameter, before it was sharded, had which memory; what still refers to that is found by it."""

    def __init__(self) -> None:
        self._parameters: dict[int, tuple[StorageWeakRef, nn.Parameter]] = {}

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if not is_dtensor(parameter) and not parameter.is_meta and parameter.is_contiguous():
                # Weak: it keeps no memory, but nothing else gets its identity either.
                memory = StorageWeakRef(parameter.untyped_storage())
                self._parameters[memory.cdata] = (memory, parameter)

    def parameter_of(self, tensor: torch.Tensor) -> nn.Parameter | None:
        """The parameter that had the memory of this tensor, of any shape."""
        if is_dtensor(tensor) or tensor.layout is not torch.strided or tensor.is_meta:
            return None
        found = self._parameters.get(storage_key(tensor))
        return None if found is None else found[1]

    def clear(self) -> None:
        self._parameters.clear()


@dataclass(eq=False)
class Alias:
    """A tensor that shares a parameter's memory, such as ``p.data`` that an optimizer keeps."""

    tensor: torch.Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Alias:
        return cls(tensor, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def attach(self, whole: torch.Tensor) -> None:
        """Be a view of the whole tensor, as it was one of the parameter's memory: of ``size``, wherever that begins."""
        self.tensor.data = whole.detach().as_strided(self.size, self.stride, self.offset)

    def release(self) -> None:
        self.tensor.data = self.tensor.new_empty(0)


class Gradient(NamedTuple):
    """A gathered gradient, and its version then: a later one was written to."""

    tensor: torch.Tensor
    version: int


class WholeParameter:
    """The whole of one sharded parameter, while its optimizer steps; in between it is empty.

    Args:
        sharded: A DTensor.
        original: The parameter in whose place ``sharded`` came, to which an optimizer may hold references.
    """

    def __init__(self, sharded: torch.Tensor, original: nn.Parameter | None) -> None:
        self.sharded = sharded
        device = torch.device(sharded.device_mesh.device_type)  # type: ignore[attr-defined]
        # The original is used again if it can be, because hooks, groups and attributes of the optimizer may refer to
        # it.
        is_alike = (
            original is not None
            and original.dtype == sharded.dtype
            and original.device.type == device.type
            and not is_dtensor(original)
        )
        self.whole: nn.Parameter = (
            original  # type: ignore[assignment]
            if is_alike
            else nn.Parameter(torch.empty(0, dtype=sharded.dtype, device=device), sharded.requires_grad)
        )
        revive(self.whole)
        if not is_alike:
            self.whole.__dict__.update(sharded.__dict__)
        self.aliases: list[Alias] = []
        self._gradient: Gradient | None = None

    def add_alias(self, tensor: torch.Tensor) -> None:
        """Let ``tensor``, of any shape, which shares the memory of this parameter, share it in each step."""
        if not any(alias.tensor is tensor for alias in self.aliases):
            self.aliases.append(Alias.of(tensor))

    def new_alias(self) -> torch.Tensor:
        """A tensor that shares the memory of this parameter in each step."""
        stride = torch.empty(self.sharded.shape, device="meta").stride()
        tensor = self.whole.new_empty(0)
        self.aliases.append(Alias(tensor, tuple(self.sharded.shape), stride, 0))
        return tensor

    def gather(self) -> None:
        """Have the values and the gradient of now. Collective."""
        whole = self.whole
        values = gathered(self.sharded.detach())
        # In place, if the memory is there: views of it that the optimizer keeps must see the new values.
        if whole.shape == values.shape and whole.device == values.device:
            # In place: tensors that share its memory go on to do so.
            whole.data.copy_(values)
        else:
            whole.data = values
        for alias in self.aliases:
            alias.attach(whole)
        whole.requires_grad_(self.sharded.requires_grad)
        self._gradient = None
        gradient = self.sharded.grad
        if gradient is not None:
            gradient = gathered(gradient.detach())
            if gradient.dtype != whole.dtype and hasattr(whole, "grad_dtype"):
                whole.grad_dtype = gradient.dtype
            self._gradient = Gradient(gradient, version(gradient))
        whole.grad = gradient

    def write_back(self) -> None:
        """Let this rank's shard, and that of the gradient, be what the whole is now."""
        sharded, whole = self.sharded, self.whole
        if whole.shape != sharded.shape:
            raise UsageError(
                f"An optimizer changed the shape of a parameter from {tuple(sharded.shape)} to "
                f"{tuple(whole.shape)}, but the shape of a sharded parameter cannot change. Leave the shapes of "
                "parameters as they are, or use parallel='ddp'."
            )
        _copy_part(whole.detach(), sharded.detach())
        gradient, known = whole.grad, self._gradient
        if gradient is None:
            sharded.grad = None
        elif sharded.grad is None:
            sharded.grad = shard_like(gradient, sharded)
        # A gradient that the step has not touched need not be cut again.
        elif known is None or known.tensor is not gradient or known.version != version(gradient):
            _copy_part(gradient, sharded.grad)

    def release(self) -> None:
        """Be empty again."""
        self.whole.grad = self._gradient = None
        self.whole.data = self.whole.new_empty(0)
        for alias in self.aliases:
            alias.release()


def gathered(sharded: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor, of its global shape, in memory of its own. Collective."""
    every, part = full(sharded), local(sharded)
    is_shared = storage_key(every) == storage_key(part)
    return every.clone() if is_shared else every


def _copy_part(whole: torch.Tensor, sharded: torch.Tensor) -> None:
    part = local(sharded)
    for region in regions_of(sharded):
        region.local_view(part).copy_(region.whole_view(whole))


class WholeState:
    """The state that an optimizer keeps of sharded parameters: whole in a step, in between as sharded as they are.

    The tensors stay the objects that the optimizer made, because it may hold them elsewhere too; of one that it does
    hold elsewhere, and of what has another shape than its parameter, every rank keeps the whole.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[int, object], torch.Tensor] = {}

    def gather(self, parameter: WholeParameter, values: dict[object, object]) -> None:
        """Collective."""
        # In one order on all ranks: each may have made its state in another.
        for name in sorted(values, key=str):
            value = values[name]
            if not is_dtensor(value):
                continue
            alias = next(
                (a for a in parameter.aliases if a.tensor is self._tensors.get(_key(parameter, name))), None
            )
            if alias is not None:
                values[name] = alias.tensor
                continue
            whole = gathered(value.detach())
            tensor = self._tensors.get(_key(parameter, name))
            if tensor is None or tensor.dtype != whole.dtype or tensor.device != whole.device:
                values[name] = whole
            else:
                tensor.data = whole
                values[name] = tensor

    def cut(self, parameter: WholeParameter, values: dict[object, Any]) -> None:
        memory = storage_key(parameter.whole)
        used: dict[int, int] = {}
        for value in values.values():
            if isinstance(value, torch.Tensor) and not is_dtensor(value):
                place = storage_key(value)
                used[place] = used.get(place, 0) + 1
        for name in list(values):
            value = values[name]
            if not isinstance(value, torch.Tensor) or is_dtensor(value) or value.layout is not torch.strided:
                continue
            if not value.ndim or value.shape != parameter.sharded.shape:
                continue
            place = storage_key(value)
            # It shares the parameter's memory: it is attached to the whole in each step, and sharded alike.
            if place == memory and value is not parameter.whole:
                parameter.add_alias(value)
                self._tensors[_key(parameter, name)] = value
                values[name] = parameter.sharded.detach()
                continue
            is_known = self._tensors.get(_key(parameter, name)) is value
            # This name would count as a reference.
            del value
            # It shares memory, or somebody else holds it: it stays whole.
            if used[place] > 1 or _references(values, name) > _LEAST_REFERENCES + is_known:
                continue
            value = values[name]
            values[name] = shard_like(value.detach(), parameter.sharded)
            self._tensors[_key(parameter, name)] = value
            # The object is kept for the next step, without its memory: the shard has the values.
            value.data = value.new_empty(0)


def _key(parameter: WholeParameter, name: object) -> tuple[int, object]:
    return id(parameter), name


def _references(values: Mapping[object, object], name: object) -> int:
    value = values[name]
    return sys.getrefcount(value)


# What counting itself adds: a tensor that nobody else holds has as many.
_LEAST_REFERENCES = _references({"": torch.empty(0)}, "")

_LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    ModuleType,
    nn.Module,
    FunctionType,
    torch.dtype,
)


def visit_tensors(
    root: object, visit: Callable[[torch.Tensor], torch.Tensor], skip: Iterable[object] = ()
) -> None:
    """Put ``visit(tensor)`` in the place of each tensor that ``root`` holds, in attributes and containers.

    Modules, functions and classes are not looked into, nor is what is in ``skip``.
    """
    seen = {id(item) for item in skip}
    # Depth first, each object once: optimizers refer to themselves through their groups and hooks.
    # What is looked at must not make room for another object of the same identity.
    kept: list[object] = []

    def walk(item: object) -> object:
        if isinstance(item, torch.Tensor):
            return visit(item)
        if isinstance(item, _LEAVES) or id(item) in seen:
            return item
        seen.add(id(item))
        kept.append(item)
        if isinstance(item, dict):
            pairs = [(walk(key), walk(value)) for key, value in list(item.items())]
            if any(new is not old for (new, _), old in zip(pairs, list(item), strict=True)):
                item.clear()
            item.update(pairs)
        elif isinstance(item, (list, deque)):
            for place, value in enumerate(item):
                item[place] = walk(value)
        elif type(item) is tuple:
            found = tuple(walk(value) for value in item)
            return item if all(a is b for a, b in zip(found, item, strict=True)) else found
        elif isinstance(item, (set, frozenset)):
            for value in list(item):
                walk(value)
        elif hasattr(item, "__dict__"):
            walk_attributes(item)
        return item

    def walk_attributes(item: object) -> None:
        for name, value in list(vars(item).items()):
            new = walk(value)
            if new is not value:
                vars(item)[name] = new

    walk(root)


def tensors_of(groups: Iterable[StateDict]) -> Iterator[torch.Tensor]:
    """The parameters of an optimizer's groups."""
    return (parameter for group in groups for parameter in group["params"])
