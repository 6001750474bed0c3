"""A dispatched model cannot be moved or converted as a whole: its weights are where the device map says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.torch_internals import modules as torch_modules


def guard(model: nn.Module) -> None:
    """Refuse ``to``, ``cuda``, ``half`` and the like on ``model``, unless they would change nothing."""
    torch_modules.intercept_apply(model, partial(_apply_or_refuse, model))


def unguard(model: nn.Module) -> None:
    """Allow them again."""
    torch_modules.restore_apply(model)


def _apply_or_refuse(
    model: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True, **_: Any
) -> nn.Module:
    """In place of what all of them go through."""
    tensors = [*model.parameters(), *model.buffers()]
    if all(_changes_nothing(fn, device, dtype) for device, dtype in {(t.device, t.dtype) for t in tensors}):
        return model
    raise UsageError(
        f"{type(model).__name__} is dispatched by a device map and streamed, so that it cannot be moved or converted. "
        "Pass device_map and dtype when loading it, or call remove_hook_from_submodules(model) before."
    )


def _changes_nothing(
    fn: Callable[[torch.Tensor], torch.Tensor], device: torch.device, dtype: torch.dtype
) -> bool:
    probe = torch.empty(2, 2, 2, 2, dtype=dtype, device=device)
    shared = probe.is_shared()
    try:
        result = fn(probe)
    except Exception:  # such as that there is no such device; what is asked for is no change of nothing
        return False
    return (
        isinstance(result, torch.Tensor)
        and (result.device, result.dtype, result.stride()) == (device, dtype, probe.stride())
        and result.data_ptr() == probe.data_ptr()
        and result.is_shared() == shared
    )
