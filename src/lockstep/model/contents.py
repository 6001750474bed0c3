"""What lists, dictionaries and other objects hold that modules keep as attributes: compared, and put back in place."""

from __future__ import annotations

import copy
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals import tensors as torch_tensors

PLAIN = (bool, int, float, complex, str, bytes, type(None))
DEPTH = 4
"""Of objects inside of objects: state of a forward does not lie deeper."""
_OPAQUE = (type, nn.Module, types.ModuleType, torch.device, torch.dtype, torch.distributed.ProcessGroup)


def is_container(value: object) -> bool:
    """Return whether it is one whose contents can be put back in place."""
    return isinstance(value, (list, dict, set, deque))


def is_plain(value: object) -> bool:
    """Return whether it is a container of numbers, texts and such containers alone."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return all(map(is_plain, value))
    return isinstance(value, PLAIN)


def set_contents(container: Any, contents: Any) -> None:
    """Let ``container`` hold what ``contents``, one like it, holds."""
    if container is contents:
        return
    copied = copy.copy(contents)
    container.clear()
    container.update(copied) if isinstance(container, (dict, set)) else container.extend(copied)


def saved(value: object) -> Callable[[], None] | None:
    """Return what puts back all that ``value`` holds now, in place; None if it holds nothing that can change."""
    return _saved(value, set(), 0)


def is_ours(module: nn.Module) -> bool:
    """Return whether it is one of this package's: these keep their own state right."""
    return type(module).__module__.startswith("lockstep.")


def saved_attributes(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Return what puts back the objects that modules keep as attributes, tensors excepted, with all that these hold
    now."""
    kept = [
        (vars(module), name, value, restore)
        for module in modules
        for name, value in vars(module).items()
        if name not in torch_modules.OWN_ATTRIBUTES and not isinstance(value, Tensor)
        if (restore := saved(value)) is not None
    ]

    def restore_all() -> None:
        for attributes, name, value, restore in kept:
            restore()
            attributes[name] = value

    return restore_all


def around(function: object) -> list[object]:
    """Return what a function that was made inside of another has of that one's variables, and its defaults; of a
    method its
    object."""
    if isinstance(function, types.MethodType):
        return [function.__self__]
    if not isinstance(function, types.FunctionType):
        return []
    cells = [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]
    return [*cells, *(function.__defaults__ or ())]


def copy_of(module: nn.Module, memo: dict[int, object]) -> nn.Module:
    """Copy deeply; functions stay as they are, and tensors that were computed (pruned weights) are an error.

    In this copy the hooks and functions that modules keep work on the copies, and computed tensors are detached.
    """
    for inner in module.modules():
        computed = [one for one in vars(inner).values() if isinstance(one, Tensor) and not one.is_leaf]
        memo.update({id(one): one.detach().clone() for one in computed if id(one) not in memo})
    copied: nn.Module = copy.deepcopy(module, memo)
    _rebind_functions(copied, memo)
    return copied


def _rebind_functions(copied: nn.Module, copies: Mapping[int, object]) -> None:
    made = {
        key: value for key, value in copies.items() if isinstance(value, nn.Module) or is_container(value)
    }
    for module in copied.modules():
        places: list[dict[Any, object]] = [vars(module), *torch_modules.hooks_of(module)]
        for namespace in places:
            for key, value in list(namespace.items()):
                if isinstance(value, types.FunctionType):
                    namespace[key] = _rebound(value, made)


def _rebound(function: Any, copies: Mapping[int, object], seen: tuple[object, ...] = ()) -> object:
    """Return the same function for copies: of what it has around it, those in ``copies`` in their place."""
    # A function may refer to itself, directly or by way of others.
    inner = [value for value in around(function) if not any(value is one for one in (function, *seen))]
    if len(seen) > DEPTH or not any(id(value) in copies or around(value) for value in inner):
        return function

    def other(value: object) -> object:
        return copies[id(value)] if id(value) in copies else _rebound(value, copies, (*seen, function))

    if isinstance(function, types.MethodType):
        return types.MethodType(function.__func__, other(function.__self__))
    cells = tuple(
        cell if _is_empty(cell) else types.CellType(other(cell.cell_contents))
        for cell in function.__closure__ or ()
    )
    defaults = function.__defaults__ and tuple(map(other, function.__defaults__))
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, defaults, cells or None
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(vars(function))
    return made


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - it raises
    except ValueError:
        return True
    return False


def _saved(value: Any, seen: set[int], depth: int) -> Callable[[], None] | None:
    if isinstance(value, PLAIN) or id(value) in seen or depth > DEPTH or isinstance(value, _OPAQUE):
        return None
    seen.add(id(value))
    if isinstance(value, Tensor):
        return _of_tensor(value)
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: _ignore(value.set_state(state))
    if isinstance(value, random.Random):
        numbers = value.getstate()
        return lambda: value.setstate(numbers)
    if isinstance(value, np.random.Generator):
        bits = copy.deepcopy(value.bit_generator.state)
        return lambda: setattr(value.bit_generator, "state", bits)
    if is_container(value):
        copied = copy.copy(value)
        parts = list(value.values()) if isinstance(value, dict) else list(value)
        inner = _restorer_of_all(parts, seen, depth)
        return _restorer_of(value, copied, inner)
    if isinstance(value, (tuple, frozenset)):
        return _restorer_of_all(list(value), seen, depth)
    if isinstance(value, types.FunctionType):
        return _restorer_of_all([one for one in around(value) if is_container(one)], seen, depth)
    return _of_object(value, seen, depth)


def _of_tensor(tensor: Tensor) -> Callable[[], None]:
    before, version = tensor.detach().clone(), torch_tensors.version(tensor)

    @torch.no_grad()
    def restore() -> None:
        if torch_tensors.version(tensor) != version and tensor.shape == before.shape:
            tensor.copy_(before)

    return restore


def _of_object(value: object, seen: set[int], depth: int) -> Callable[[], None] | None:
    """Return what restores an instance of a class of the script's own."""
    attributes = getattr(value, "__dict__", None)
    library = type(value).__module__.partition(".")[0]
    if (
        not isinstance(attributes, dict)
        or callable(value)
        or library in ("torch", "lockstep", "transformers")
    ):
        return None
    before = dict(attributes)
    inner = _restorer_of_all(list(before.values()), seen, depth)
    return _restorer_of(attributes, before, inner)


def _restorer_of(container: object, contents: object, inner: Callable[[], None]) -> Callable[[], None]:
    def restore() -> None:
        set_contents(container, contents)
        inner()

    return restore


def _restorer_of_all(values: list[object], seen: set[int], depth: int) -> Callable[[], None]:
    found = [_saved(one, seen, depth + 1) for one in values]

    def restore() -> None:
        for one in found:
            if one is not None:
                one()

    return restore


def _ignore(value: object) -> None:
    """Discard what a lambda returns beside its effect."""
