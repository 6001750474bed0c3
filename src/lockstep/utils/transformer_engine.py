"""Names that scripts import from ``accelerate.utils.transformer_engine``: layers of NVIDIA's TransformerEngine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.utils.imports import transformer_engine_required
from lockstep.utils.operations import GatheredParameters

T = TypeVar("T")

__all__ = ["apply_fp8_autowrap", "contextual_fp8_autocast", "convert_model", "has_transformer_engine_layers"]


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Return whether ``model`` has layers of NVIDIA's TransformerEngine.

    Examples:
        ```python
        import torch
        from lockstep.utils import has_transformer_engine_layers

        assert not has_transformer_engine_layers(torch.nn.Linear(16, 16))
        ```
    """
    return any(type(module).__module__.startswith("transformer_engine") for module in model.modules())


@transformer_engine_required
def convert_model(
    model: nn.Module,
    to_transformer_engine: bool = True,
    _convert_linear: bool = True,
    _convert_ln: bool = True,
) -> None:
    """Replace linear layers and layer normalisations by those of NVIDIA's TransformerEngine, in place. Values stay.

    Args:
        model: The model. Linear layers with a size that is not divisible by 16 stay as they are.
        to_transformer_engine: False: replace TransformerEngine's layers by torch's.

    Raises:
        ImportError: transformer_engine is not installed.

    Examples:
        ```python
        import torch
        from lockstep.utils import convert_model, has_transformer_engine_layers

        model = torch.nn.Sequential(torch.nn.Linear(16, 16))
        convert_model(model)
        assert has_transformer_engine_layers(model)
        ```
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            made = _converted(child, to_transformer_engine, _convert_linear, _convert_ln)
            if made is not None:
                with (
                    torch.no_grad(),
                    GatheredParameters(list(child.parameters(recurse=False)), modifier_rank=0),
                ):
                    for key, parameter in child.named_parameters(recurse=False):
                        made.get_parameter(key).copy_(parameter)
                setattr(module, name, made)


def _converted(module: nn.Module, there: bool, linear: bool, norm: bool) -> nn.Module | None:
    """A new layer of the other kind for one that is to be replaced."""
    import transformer_engine.pytorch as engine

    theirs, ours = (engine.Linear, engine.LayerNorm), (nn.Linear, nn.LayerNorm)
    linear_kind, norm_kind = ours if there else theirs
    new_linear, new_norm = theirs if there else ours
    dtype = "params_dtype" if there else "dtype"
    layer: Any = module
    if linear and isinstance(module, linear_kind):
        if there and any(size % 16 for size in layer.weight.shape):
            return None
        has_bias = layer.bias is not None and layer.bias.numel() > 0
        made: nn.Module = new_linear(
            layer.in_features, layer.out_features, bias=has_bias, **{dtype: layer.weight.dtype}
        )
        return made
    if norm and isinstance(module, norm_kind):
        if there and (layer.bias is None or not layer.elementwise_affine or len(layer.normalized_shape) > 1):
            return None
        shape = layer.normalized_shape[0] if there else layer.weight.shape[0]
        made = new_norm(shape, eps=layer.eps, **{dtype: layer.weight.dtype})
        return made
    return None


@transformer_engine_required
def contextual_fp8_autocast(
    model_forward: Callable[..., T], fp8_recipe: object, use_during_eval: bool = False
) -> Callable[..., T]:
    """Return a forward that computes in 8 bits by TransformerEngine. Its first argument is the module.

    Args:
        model_forward: The forward.
        fp8_recipe: A recipe of TransformerEngine.
        use_during_eval: Compute in 8 bits in evaluation too, and not only in training.

    Raises:
        ImportError: transformer_engine is not installed.

    Examples:
        ```python
        from types import MethodType
        import torch
        from transformer_engine.common.recipe import DelayedScaling
        from lockstep.utils import contextual_fp8_autocast, convert_model

        model = torch.nn.Sequential(torch.nn.Linear(16, 16))
        convert_model(model)
        model.forward = MethodType(contextual_fp8_autocast(model.forward, DelayedScaling()), model)
        ```
    """
    from transformer_engine.pytorch import fp8_autocast

    @functools.wraps(model_forward)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> T:
        with fp8_autocast(enabled=use_during_eval or self.training, fp8_recipe=fp8_recipe):
            return model_forward(*args, **kwargs)

    return forward


@transformer_engine_required
def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: Any) -> nn.Module:
    """Let the forward of a model compute in 8 bits by TransformerEngine, in place, and return the model.

    Args:
        model: The model, after ``convert_model``.
        fp8_recipe_handler: A ``TERecipeKwargs``. None: TransformerEngine's defaults.

    Raises:
        ImportError: transformer_engine is not installed.
        ValueError: this GPU cannot scale blocks (MXFP8), or the recipe has options that do not go with it.

    Examples:
        ```python
        import torch
        from lockstep.utils import TERecipeKwargs, apply_fp8_autowrap, convert_model

        model = torch.nn.Sequential(torch.nn.Linear(16, 16))
        convert_model(model)
        model = apply_fp8_autowrap(model, TERecipeKwargs())
        ```
    """
    import transformer_engine.common.recipe as recipes
    from transformer_engine.pytorch.fp8 import check_mxfp8_support

    options = {} if fp8_recipe_handler is None else fp8_recipe_handler.to_kwargs()
    if "fp8_format" in options:
        options["fp8_format"] = getattr(recipes.Format, options["fp8_format"])
    during_eval = options.pop("use_autocast_during_eval", False)
    kind = recipes.DelayedScaling
    if options.pop("use_mxfp8_block_scaling", False):
        is_there, why = check_mxfp8_support()
        if not is_there:
            raise ConfigError(
                f"use_mxfp8_block_scaling=True is not possible on this GPU ({why}). Leave it out."
            )
        for name in ("amax_compute_algo", "amax_history_len"):
            if name in options:
                raise ConfigError(
                    f"{name} cannot be combined with use_mxfp8_block_scaling=True. Leave one of them out."
                )
        kind = recipes.MXFP8BlockScaling
    model.forward = MethodType(contextual_fp8_autocast(model.forward, kind(**options), during_eval), model)
    return model
