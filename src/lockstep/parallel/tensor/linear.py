"""Whether a layer that is a subclass of ``nn.Linear`` computes what that does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.torch_internals import modules as torch_modules

ROWS, TOLERANCE = 3, 1e-3


def computes_linear(layer: nn.Module) -> bool:
    """Whether its forward, if it is its own, is linear in its input, its weight and its bias alone.

    A subclass may quantise or normalise its weight, or have further parameters: a part of the weight then does not
    give a part of the result. One without values yet is believed.
    """
    if not isinstance(layer, nn.Linear) or type(layer).forward is nn.Linear.forward:
        return True
    registered = {name: p for name, p in torch_modules.parameters_of(layer).items() if p is not None}
    if any(parameter.is_meta for parameter in registered.values()):
        return True
    if set(registered) - {"weight", "bias"} or any(True for _ in layer.children()):
        return False
    places = torch.arange(ROWS * layer.in_features, device=layer.weight.device, dtype=torch.float64)
    x = torch.sin(places * places * 0.37 + 1).view(ROWS, -1).to(layer.weight.dtype)
    try:
        found = _with_gradients(layer, x, registered)
    except Exception:  # whatever its forward raises
        return False
    expected = _with_gradients(lambda x: F.linear(x, layer.weight, layer.bias), x, registered)
    return all(_close(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@torch.enable_grad()
def _with_gradients(
    function: Callable[[Tensor], Any], x: Tensor, parameters: dict[str, Tensor]
) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = function(x)
    wanted = [x, *(parameter for parameter in parameters.values() if parameter.requires_grad)]
    weights = torch.linspace(-1, 1, y.numel(), device=y.device, dtype=y.dtype).view_as(y)
    gradients = torch.autograd.grad((y * weights).sum(), wanted, allow_unused=True)
    return [
        y.detach(),
        *(torch.zeros_like(w) if g is None else g for w, g in zip(wanted, gradients, strict=True)),
    ]


def _close(mine: Tensor, theirs: Tensor) -> bool:
    if mine.shape != theirs.shape:
        return False
    tolerance = TOLERANCE if mine.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((mine - theirs).norm() <= tolerance * theirs.norm() + 1e-6)
