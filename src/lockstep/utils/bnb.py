"""Names that scripts import from ``accelerate.utils.bnb``."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["get_parameter_device", "has_4bit_bnb_layers"]


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether bitsandbytes has quantised a layer to 4 bits."""
    return any(
        type(module).__name__ == "Linear4bit" and type(module).__module__.startswith("bitsandbytes")
        for module in model.modules()
    )


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """The device of a module's first parameter."""
    return next(parameter.parameters()).device
