"""Batch normalisation in ``torch.nn``."""

from __future__ import annotations

from typing import Any

import torch


def check_input_dim(module: Any, x: torch.Tensor) -> None:
    """Raise ValueError if ``x`` has not as many dims as this kind takes. Relies on: ``_check_input_dim``."""
    module._check_input_dim(x)
