"""Names that scripts import from ``accelerate.utils.ao``: 8-bit floating point training by the package torchao."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from lockstep.parallel.float8 import filter_linear_layers, find_first_last_linear_layers

__all__ = [
    "convert_model_to_fp8_ao",
    "filter_linear_layers",
    "find_first_last_linear_layers",
]


def convert_model_to_fp8_ao(
    model: nn.Module, config: object = None, module_filter_func: Callable[..., bool] | None = None
) -> None:
    """Let linear layers of a model compute in 8-bit floating point by the package torchao, in place.

    ``mixed_precision="fp8"`` does it for prepared models.

    Args:
        model: The model.
        config: A ``torchao.float8.Float8LinearConfig``. None: torchao's default.
        module_filter_func: A function (module, its name) -> whether it is converted. None: all linear layers with
            sizes that are divisible by 16, except the first and the last one.

    Raises:
        ImportError: torchao is not installed.

    Examples:
        ```python
        import torch
        from torchao.float8 import Float8LinearConfig
        from lockstep.utils import convert_model_to_fp8_ao

        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
        convert_model_to_fp8_ao(model, Float8LinearConfig(emulate=True))  # the layer in the middle
        assert type(model[1]).__name__ == "Float8Linear"
        ```
    """
    from torchao.float8 import convert_to_float8_training

    first, last = find_first_last_linear_layers(model)
    if module_filter_func is None:
        names = [name for name in (first, last) if name is not None]
        module_filter_func = partial(filter_linear_layers, layers_to_filter=names)
    convert_to_float8_training(model, module_filter_fn=module_filter_func, config=config)
