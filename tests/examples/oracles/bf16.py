"""bf16 in plain torch: the outermost modules compute under `torch.autocast`, and return float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree


def in_float32(value: object) -> object:
    is_half = isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16
    return value.float() if is_half else value


@contextmanager
def autocast_modules(recipe: ModuleType) -> Iterator[None]:
    """All modules compute in bf16, but a recipe's teacher: it stands for a download, and has a precision of its own."""
    plain, in_float32_alone = nn.Module.__call__, set[nn.Module]()

    def call(self: nn.Module, *args: object, **kwargs: object) -> Any:
        if torch.is_autocast_enabled("cpu") or self in in_float32_alone:
            return plain(self, *args, **kwargs)
        with torch.autocast("cpu", torch.bfloat16):
            output = plain(self, *args, **kwargs)
        return pytree.tree_map(in_float32, output)

    def float32_teacher(*args: object) -> nn.Module:
        with mock.patch.object(nn.Module, "__call__", plain):
            trained: nn.Module = of_recipe(*args)
        in_float32_alone.update(trained.modules())
        return trained

    of_recipe = getattr(recipe, "trained_teacher", None)
    if of_recipe is not None:
        recipe.trained_teacher = float32_teacher
    with mock.patch.object(nn.Module, "__call__", call):
        yield
