"""What clipping by a norm does to gradients, to be done later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_


@dataclass(frozen=True)
class GradientScale:
    """What ``clip_grads_with_norm_`` does to gradients of which ``norm`` (0-d) is the norm."""

    max_norm: float
    norm: torch.Tensor

    def changes_nothing(self) -> bool:
        return bool(float(self.max_norm) / (self.norm + 1e-6) >= 1.0)

    @torch.no_grad()
    def apply(self, gradients: Sequence[torch.Tensor]) -> None:
        """Scale plain tensors in place."""
        holders: Any = [SimpleNamespace(grad=gradient) for gradient in gradients]
        clip_grads_with_norm_(holders, self.max_norm, self.norm)
