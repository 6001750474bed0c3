"""What a forward changes beside its result, put back: a pass that only compares leaves no trace in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.dtensor import local
from lockstep.model.contents import is_ours, saved, saved_attributes
from lockstep.parallel.pipeline.absent import is_placeholder
from lockstep.runtime.seed import rng_state, set_rng_state
from lockstep.torch_internals import modules as torch_modules

_PLAIN = (bool, int, float, str, type(None))


class Snapshot:
    """Random number generators, buffers, and plain values that modules of the user keep as attributes."""

    def __init__(self, model: nn.Module) -> None:
        self._rng = rng_state()
        self._model = model
        self._buffers = {
            (id(module), name): (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in torch_modules.buffers_of(module).items()
            if buffer is not None
        }
        own = [module for module in model.modules() if not is_ours(module)]
        self._attributes = [(module, attributes(module)) for module in own]
        self._restore_objects = saved_attributes(own)
        self._around_hooks = [
            restore
            for module in own
            for hooks in torch_modules.hooks_of(module)
            for hook in hooks.values()
            if (restore := saved(hook)) is not None
        ]
        self._names = {id(module): set(vars(module)) for module, _ in self._attributes}
        # Parameters are copied only when a forward is about to write to them: there is no memory for all.
        self._written: dict[int, tuple[Tensor, Tensor]] = {}
        # By address, as a write may go to a view.
        self._parameters = {local(p).untyped_storage().data_ptr(): p for p in nn.Module.parameters(model)}

    def named_buffers(self) -> dict[str, Tensor]:
        """Return the buffers as they were, under all their names."""
        return {
            f"{prefix}.{name}" if prefix else name: self._buffers[id(module), name][3]
            for prefix, module in self._model.named_modules(remove_duplicate=False)
            for name in torch_modules.buffers_of(module)
            if (id(module), name) in self._buffers
        }

    def changed_numbers(self) -> dict[str, object]:
        """Full name -> value now of each number or text that modules keep and that is another one since."""
        before = {id(module): values for module, values in self._attributes}
        return {
            f"{prefix}.{name}" if prefix else name: value
            for prefix, module in self._model.named_modules()
            for name, (_, value) in attributes(module).items()
            if isinstance(value, _PLAIN)
            and name in before.get(id(module), {})
            and not _is_unchanged(before[id(module)][name][1], value)
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back as it was."""
        for module, name, buffer, values in self._buffers.values():
            # In place, as others may hold the buffer too.
            if buffer.shape == values.shape:
                buffer.copy_(values)
            torch_modules.buffers_of(module)[name] = buffer if buffer.shape == values.shape else values
        for module, before in self._attributes:
            for name in set(vars(module)) - self._names[id(module)]:
                if not is_placeholder(vars(module)[name]):
                    del vars(module)[name]
            for name, (value, copy) in before.items():
                _put_back(module, name, value, copy)
        self._restore_objects()
        for restore in self._around_hooks:
            restore()
        for part, copy in self._written.values():
            part.copy_(copy)
        set_rng_state(self._rng)

    def before_write(self, tensor: Tensor) -> None:
        """Keep the values of ``tensor``, which is about to be changed in place, if it is a parameter or a view of
        one."""
        if tensor.is_meta or hasattr(tensor, "fake_mode"):
            # Of a forward that only looks at shapes.
            return
        place = local(tensor).untyped_storage().data_ptr()
        parameter = self._parameters.get(place) if place else None
        if parameter is not None and place not in self._written:
            part = local(parameter.detach())
            self._written[place] = (part, part.clone())


def attributes(module: nn.Module) -> dict[str, tuple[object, object]]:
    """Return name -> (value, a copy) of numbers, texts and tensors that the module keeps as attributes.

    Tensors without values stand for parameters of another stage of a pipeline.
    """
    found: dict[str, tuple[object, object]] = {}
    for name, value in vars(module).items():
        if name in torch_modules.OWN_ATTRIBUTES or is_placeholder(value):
            continue
        if isinstance(value, _PLAIN):
            found[name] = (value, value)
        elif isinstance(value, Tensor):
            found[name] = (value, value.detach().clone())
    return found


def numbers(model: nn.Module) -> dict[str, object]:
    """Full name -> value of each number and text that a module of the user keeps as an attribute."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in model.named_modules()
        if not is_ours(module)
        for name, value in [*_copies(module), ("training", module.training)]
        if isinstance(value, _PLAIN)
    }


def set_numbers(model: nn.Module, values: Mapping[str, object]) -> None:
    """Let modules keep these values, by full name, where they are of this model."""
    modules = dict(model.named_modules())
    for full, value in values.items():
        prefix, _, name = full.rpartition(".")
        if prefix in modules:
            setattr(modules[prefix], name, value)


def _copies(module: nn.Module) -> list[tuple[str, object]]:
    return [(name, copy) for name, (_, copy) in attributes(module).items()]


def _is_unchanged(before: object, now: object) -> bool:
    return bool(before == now) or (before != before and now != now)


def _put_back(module: nn.Module, name: str, value: object, copy: Any) -> None:
    if isinstance(value, Tensor) and value.shape == copy.shape:
        value.copy_(copy)
    vars(module)[name] = value
