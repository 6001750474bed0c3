"""Tensors that have several names in a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.torch_internals import modules as torch_modules


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has more than one, sorted; groups in the order of the model."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


@dataclass
class TensorRef:
    """A parameter or buffer, all its names, and the modules that hold it."""

    tensor: torch.Tensor
    is_parameter: bool
    is_persistent: bool
    names: list[str] = field(default_factory=list)
    holders: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]

    def replace(self, data: torch.Tensor) -> None:
        """Let every holder have ``data`` instead; a parameter stays of its class, and keeps its attributes."""
        tensor = like(self.tensor, data) if self.is_parameter else data
        for module, key in self.holders:
            _registered(module, self.is_parameter)[key] = tensor
        self.tensor = tensor


def tensor_refs(model: nn.Module) -> list[TensorRef]:
    """Every parameter and buffer of the model, once, parameters first.

    Raises:
        UsageError: a parameter has no shape yet (a lazy module).
    """
    refs: dict[int, TensorRef] = {}
    for is_parameter in (True, False):
        for module_name, module in model.named_modules(remove_duplicate=False):
            for key, tensor in _registered(module, is_parameter).items():
                if tensor is None:
                    continue
                name = f"{module_name}.{key}" if module_name else key
                if torch.nn.parameter.is_lazy(tensor):
                    raise UsageError(
                        f"{name} has no shape yet: {type(module).__name__} is lazy. Run the model once, then place it."
                    )
                persistent = is_parameter or torch_modules.is_persistent(module, key)
                ref = refs.setdefault(id(tensor), TensorRef(tensor, is_parameter, persistent))
                ref.names.append(name)
                ref.is_persistent |= persistent
                if not any(holder is module and held == key for holder, held in ref.holders):
                    ref.holders.append((module, key))
    return list(refs.values())


def _registered(module: nn.Module, is_parameter: bool) -> dict[str, Any]:
    return torch_modules.parameters_of(module) if is_parameter else torch_modules.buffers_of(module)


def like(parameter: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """A parameter of the same class, ``requires_grad`` and attributes around ``data``."""
    if not isinstance(parameter, nn.Parameter):
        return data
    kind: Any = type(parameter)
    requires_grad = parameter.requires_grad and (data.is_floating_point() or data.is_complex())
    new = kind(data, requires_grad=requires_grad)
    new.__dict__.update(parameter.__dict__)
    return new


@contextmanager
def undone_on_error(model: nn.Module, undo: Callable[[nn.Module], None]) -> Iterator[None]:
    """Give the model back the tensors that it has now if there is an error inside, after ``undo(model)``."""
    held = [
        (module, dict(torch_modules.parameters_of(module)), dict(torch_modules.buffers_of(module)))
        for module in model.modules()
    ]
    try:
        yield
    except BaseException:
        undo(model)
        for module, parameters, buffers in held:
            _registered(module, True).update(parameters)
            _registered(module, False).update(buffers)
        raise
