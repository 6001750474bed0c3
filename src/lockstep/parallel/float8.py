"""Linear layers in 8-bit floating point, by torchao.

Weights, gradients and optimizer state stay as they are. A converted layer casts its input, its weight and the gradient
of its output to 8 bits, each with one scale for all its numbers or one for each row, and multiplies those; everything
else runs under autocast in bfloat16.

Reference: Micikevicius et al., FP8 Formats for Deep Learning, 2022.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from lockstep.config.fp8 import AORecipeKwargs
from lockstep.config.parallel import Parallel
from lockstep.errors import ConfigError, UsageError

CAPABILITY = (8, 9)
"""The least compute capability of NVIDIA's GPUs that multiply numbers of 8 bits."""


def check_float8(recipe: AORecipeKwargs | None, parallel: Parallel, device: torch.device) -> None:
    """Raise ConfigError where models cannot be trained in 8 bits on this device, or not spread so."""
    if recipe is None:
        return
    words = {
        name: getattr(parallel, name) for name in ("tp", "pp", "cp", "ep") if getattr(parallel, name) > 1
    }
    others = [f"{name}={value}" for name, value in words.items()]
    others += ["quantized_weights"] if parallel.quantized_weights else []
    others += ["dataparallel"] if parallel.strategy == "dataparallel" else []
    if others:
        raise ConfigError(
            f"mixed_precision='fp8' is not available with {' '.join(others)} (parallel='{parallel}'). Drop these "
            "options, or use mixed_precision='bf16'."
        )
    if recipe.config.emulate:
        return
    has = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    is_rocm = torch.version.hip is not None
    if has is None or (has < CAPABILITY and not is_rocm):
        found = device.type if has is None else f"one of {has[0]}.{has[1]}"
        raise ConfigError(
            f"mixed_precision='fp8' needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or above, and "
            f"this process has {found}. Use mixed_precision='bf16', or compute the same numbers slowly with "
            "AORecipeKwargs(config=Float8LinearConfig(emulate=True))."
        )


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last linear layer of ``model``, in the order of its modules. None: it has
    none.

    Examples:
        ```python
        import torch
        from lockstep.utils import find_first_last_linear_layers

        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 16))
        assert find_first_last_linear_layers(model) == ("0", "2")
        ```
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: list[str]) -> bool:
    """Return whether a module can be converted to 8-bit floating point: a linear layer with sizes divisible by 16.

    Args:
        module: The module.
        fqn: Its name in the model.
        layers_to_filter: Names of modules that are not converted.

    Examples:
        ```python
        import torch
        from lockstep.utils import filter_linear_layers

        assert filter_linear_layers(torch.nn.Linear(16, 32), "body", layers_to_filter=["head"])
        assert not filter_linear_layers(torch.nn.Linear(16, 32), "head", layers_to_filter=["head"])
        ```
    """
    if not isinstance(module, nn.Linear):
        return False
    return not (module.in_features % 16 or module.out_features % 16) and fqn not in layers_to_filter


def convert(model: nn.Module, recipe: AORecipeKwargs) -> None:
    """Let linear layers of a model compute in 8 bits, in place. Those that do already are left as they are.

    Where weights are sharded they are gathered in bfloat16 and cast then, also if the recipe's
    ``enable_fsdp_float8_all_gather`` asks to cast them before: that would take parameters of another class.

    Raises:
        UsageError: the recipe converts the model itself, or nothing of it.
    """
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    is_chosen = recipe.module_filter_func
    if is_chosen is None:
        names = [name for name in find_first_last_linear_layers(model) if name is not None]
        is_chosen = partial(filter_linear_layers, layers_to_filter=names)
    chosen = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not isinstance(module, Float8Linear) and is_chosen(module, name)
    }
    if "" in chosen:
        raise UsageError(
            f"The {type(model).__name__} that prepare got is itself a linear layer, but mixed_precision='fp8' "
            "replaces linear layers inside a module. Put it into a module, such as torch.nn.Sequential(layer)."
        )
    if not chosen and not any(isinstance(module, Float8Linear) for module in model.modules()):
        raise UsageError(
            f"mixed_precision='fp8' converts no layer of {type(model).__name__}: its linear layers are the "
            "first, the last, or have sizes that are not multiples of 16. Use mixed_precision='bf16', or choose "
            "layers with AORecipeKwargs(module_filter_func=...)."
        )
    config = recipe.config
    if config.enable_fsdp_float8_all_gather:
        config = replace(config, enable_fsdp_float8_all_gather=False)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in chosen, config=config)
