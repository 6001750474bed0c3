"""What torch's ``clip_grad_norm_`` takes the norm of.

Relies on: it calls ``_get_total_norm`` of its module with a list of gradients first. ``get_total_norm`` of
``torch.nn.utils`` is another name of that function, and stays as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils import clip_grad


@functools.cache
def check_clipped(check: Callable[[Sequence[torch.Tensor]], None]) -> None:
    """Have ``check`` called with the gradients that torch's ``clip_grad_norm_`` is about to clip, from now on."""
    module: Any = clip_grad
    in_torch = module._get_total_norm

    @functools.wraps(in_torch)
    def total_norm(gradients: Sequence[torch.Tensor], *args: object) -> object:
        check(gradients)
        return in_torch(gradients, *args)

    module._get_total_norm = total_norm
