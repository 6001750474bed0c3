"""Names that scripts import from ``accelerate.utils.transformer_engine``."""

from __future__ import annotations

from torch import nn

__all__ = ["has_transformer_engine_layers"]


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Whether a layer is one of NVIDIA's TransformerEngine."""
    return any(type(module).__module__.startswith("transformer_engine") for module in model.modules())
