"""``nn.Module``: what a module is made of, and the base classes of layers that torch has no public name for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from lockstep.torch_internals.versions import expect, probed

Registered: TypeAlias = dict[str, Any]
"""Parameters, buffers or modules by name, None among them."""

BatchNorm: type[_BatchNorm] = _BatchNorm
"""Base class. Relies on: it has no other subclasses than batch normalisation, synchronised or lazy ones among them."""
Convolution: type[_ConvNd] = _ConvNd
"""Base class. Relies on: ``kernel_size`` has a number for each dimension."""
Dropout: type[_DropoutNd] = _DropoutNd
"""Base class. Relies on: ``p`` is the probability of all dropout layers."""
InstanceNorm: type[_InstanceNorm] = _InstanceNorm
"""Base class of instance normalisation."""

FLAT_WEIGHTS = "_flat_weights"
"""Relies on: the attribute of a recurrent module that its forward reads its weights from, as a list."""
EXTRA_STATE = "_extra_state"
"""Relies on: the last part of the key under which ``get_extra_state()`` stands in a state dictionary."""


def parameters_of(module: nn.Module) -> Registered:
    """Return the module's own. Relies on: ``_parameters`` is what attributes, ``parameters()`` and state
    dictionaries read."""
    return module._parameters


def set_parameters_of(module: nn.Module, registered: Registered) -> None:
    """Let the module have this very dictionary, which another one may have as well."""
    module._parameters = registered


def buffers_of(module: nn.Module) -> Registered:
    """Return the module's own. Relies on: ``_buffers``, as ``_parameters``."""
    return module._buffers


def children_of(module: nn.Module) -> Registered:
    """Return the module's own. Relies on: ``_modules``, as ``_parameters``."""
    return module._modules


def every_parameter(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters as often as they stand in the model, quicker than ``nn.Module.parameters``.

    Relies on: as ``parameters_of`` and ``children_of``.
    """
    waiting: list[nn.Module | None] = [model]
    found: list[nn.Parameter | None] = []
    while waiting:
        module = waiting.pop()
        if module is not None:
            found.extend(module._parameters.values())
            waiting.extend(module._modules.values())
    return [parameter for parameter in found if parameter is not None]


def set_children_of(module: nn.Module, registered: Registered) -> None:
    """Let the module have this very dictionary. Relies on: ``_modules``, as above."""
    module.__dict__["_modules"] = registered


OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Names of what each module keeps for torch. Relies on: a new module has all of them, and nothing else."""

REGISTRIES = ("_parameters", "_buffers", "_modules")
"""Of these the ones in which it keeps what was registered."""
REGISTERED = (parameters_of, buffers_of)
"""What has the tensors of a module."""


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return whether it is saved. Relies on: ``_non_persistent_buffers_set`` has the names of those that are not."""
    return buffer not in module._non_persistent_buffers_set


def forward_pre_hooks_of(module: nn.Module) -> list[Callable[..., object]]:
    """Return the hooks in the order of their calls. Relies on: ``_forward_pre_hooks`` is a dictionary of them."""
    return list(module._forward_pre_hooks.values())


def hooks_of(module: nn.Module) -> list[dict[int, object]]:
    """Return all dictionaries of hooks. Relies on: the names of those that have them end so, as ``_forward_hooks``
    does."""
    return [
        vars(module)[name] for name in OWN_ATTRIBUTES if name.endswith("_hooks") and vars(module).get(name)
    ]


def reset_method(module: nn.Module) -> Callable[[], None] | None:
    """Return what gives a module its first values. Relies on: ``_reset_parameters`` where it is not public
    (attention)."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def has_flat_weights(module: nn.Module) -> bool:
    """Return whether it is recurrent, and keeps its weights in a list as well."""
    return hasattr(module, "_flat_weights_names")


def flat_weights(module: Any) -> list[object]:
    """Return that list, made anew. Relies on: ``_flat_weights_names`` has their names, in order."""
    return [getattr(module, name, None) for name in module._flat_weights_names]


def renew_flat_weights(module: Any) -> None:
    """Let the forward use the weights that are the module's attributes now."""
    module._flat_weights = flat_weights(module)


def intercept_apply(module: nn.Module, apply: Callable[..., nn.Module]) -> None:
    """Relies on: ``to``, ``cuda``, ``half`` and the like all go through ``_apply``, looked up in the object first."""
    module.__dict__["_apply"] = apply


def restore_apply(module: nn.Module) -> None:
    """Undo ``intercept_apply``."""
    module.__dict__.pop("_apply", None)


@probed("nn.Module", "keeps parameters, buffers and hooks")
def probe() -> None:
    """Build a module, and ask and change it through the functions above."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(2))
    module.register_buffer("passing", torch.ones(1), persistent=False)
    module.child = nn.Linear(1, 1)
    expect(children_of(module) == {"child": module.child}, "own modules")
    expect(list(buffers_of(module)) == ["passing"], "own buffers")
    expect(not is_persistent(module, "passing"), "which buffers are saved")
    other = nn.Parameter(torch.zeros(2))
    parameters_of(module)["weight"] = other
    expect(module.weight is other and other in every_parameter(module), "a parameter that was replaced")
    module.register_forward_pre_hook(print)
    expect(forward_pre_hooks_of(module) == [print] and len(hooks_of(module)) == 1, "hooks of a forward")
    intercept_apply(module, lambda *_, **__: other)  # type: ignore[arg-type]
    expect(module.half() is other, "what moves and converts a module")
    expect(reset_method(nn.MultiheadAttention(2, 1)) is not None, "the first values of attention")
    recurrent: Any = nn.RNN(1, 1)
    expect(flat_weights(recurrent) == [*recurrent.parameters()], "the weights of a recurrent module")


def check_input_dim(module: _BatchNorm, x: torch.Tensor) -> None:
    """Raise ValueError if ``x`` has not as many dims as this kind takes. Relies on: ``_check_input_dim``."""
    module._check_input_dim(x)
