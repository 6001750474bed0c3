"""Names that scripts import from ``accelerate.utils.ao``: 8-bit floating point training by the package torchao."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from lockstep.parallel.float8 import filter_linear_layers, find_first_last_linear_layers
from lockstep.utils.imports import torchao_required

__all__ = [
    "convert_model_to_fp8_ao",
    "filter_first_and_last_linear_layers",
    "filter_linear_layers",
    "find_first_last_linear_layers",
    "has_ao_layers",
]


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """``filter_linear_layers`` for the names in ``module`` of its own first and last linear layer."""
    first, last = find_first_last_linear_layers(module)
    return filter_linear_layers(module, fqn, [name for name in (first, last) if name is not None])


@torchao_required
def has_ao_layers(model: nn.Module) -> bool:
    """Whether it has layers that torchao has converted."""
    from torchao.float8.float8_linear import Float8Linear

    return any(isinstance(module, Float8Linear) for module in model.modules())


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module, config: Any = None, module_filter_func: Callable[..., bool] | None = None
) -> None:
    """Let the linear layers of a model, without the first and the last, compute in 8 bits. In place."""
    from torchao.float8 import convert_to_float8_training

    first, last = find_first_last_linear_layers(model)
    if module_filter_func is None:
        names = [name for name in (first, last) if name is not None]
        module_filter_func = partial(filter_linear_layers, layers_to_filter=names)
    convert_to_float8_training(model, module_filter_fn=module_filter_func, config=config)
