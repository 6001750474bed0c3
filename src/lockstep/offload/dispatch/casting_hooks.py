"""A hook that stores the weights of a layer in one dtype, and has them in another one while the layer computes."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import nn

from lockstep.offload.dispatch.module_hooks import CallArguments, ModelHook, add_hook_to_module

UPCAST_LAYERS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)
"""Layers whose weights may be stored in another type than they compute in."""


class LayerwiseCastingHook(ModelHook):
    """A hook that stores the weights of a module in one dtype, and casts them to another one for each forward.

    Args:
        storage_dtype: The dtype in which weights are stored, such as ``torch.float8_e4m3fn``.
        compute_dtype: The dtype that they have during the forward.
        non_blocking: Cast asynchronously.

    Examples:
        ```python
        import torch
        from lockstep.hooks import LayerwiseCastingHook, add_hook_to_module

        hook = LayerwiseCastingHook(torch.bfloat16, torch.float32, non_blocking=False)
        layer = add_hook_to_module(torch.nn.Linear(4, 1), hook)
        assert layer.weight.dtype == torch.bfloat16  # at rest
        ```
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> CallArguments:
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: object) -> object:
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear and convolution layers in one dtype, and compute in another one. Use it for
    inference.

    Args:
        module: The model, which is changed in place.
        storage_dtype: The dtype in which weights are stored, such as ``torch.float8_e4m3fn``.
        compute_dtype: The dtype that they have during the forward.
        skip_modules_pattern: Regular expressions. Modules whose name has a match stay as they are, with all below
            them.
        skip_modules_classes: Classes of modules that stay as they are, with all below them.
        non_blocking: Cast asynchronously.

    Examples:
        ```python
        import torch
        from lockstep.big_modeling import attach_layerwise_casting_hooks

        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        attach_layerwise_casting_hooks(model, storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
        assert model[0].weight.dtype == torch.bfloat16
        with torch.no_grad():
            assert model(torch.randn(2, 4)).dtype == torch.float32
        ```
    """
    patterns = (
        (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    )
    for name, part in _not_skipped(module, "", patterns, skip_modules_classes or ()):
        if isinstance(part, UPCAST_LAYERS):
            own = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(module.get_submodule(name), own, append=True)


def _not_skipped(
    module: nn.Module, name: str, patterns: tuple[str, ...], classes: tuple[type[nn.Module], ...]
) -> Iterable[tuple[str, nn.Module]]:
    """(name, module) of what is left when modules of these names and classes are taken out with all below them."""
    if isinstance(module, classes) or any(re.search(pattern, name) for pattern in patterns):
        return
    yield name, module
    for key, child in module.named_children():
        yield from _not_skipped(child, f"{name}.{key}" if name else key, patterns, classes)
