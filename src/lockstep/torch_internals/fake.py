"""Tensors without values: shapes, types and views as torch computes them, without memory. Their import is slow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._pytree import tree_leaves as tree_leaves

from lockstep.torch_internals.versions import expect, probed

UNKNOWN_VALUE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""Relies on: what is raised where a value would be needed."""


def without_values(func: Callable[..., object], args: Any, kwargs: dict[str, object]) -> object:
    """Call ``func(*args, **kwargs)`` where one of the tensors has no values.

    Relies on: the shapes of ``aten._grouped_mm`` (experts) are known for bfloat16 alone, though it computes in others;
    shapes once found are remembered for ``view`` and not for ``_unsafe_view``, which is the same here.
    """
    if func is torch.ops.aten._unsafe_view.default:
        return torch.ops.aten.view.default(*args)
    grouped = getattr(torch.ops.aten, "_grouped_mm", None)
    if grouped is None or func is not grouped.default or args[0].dtype == torch.bfloat16:
        return func(*args, **kwargs)
    half = [
        a.to(torch.bfloat16) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args
    ]
    return func(*half, **{**kwargs, "out_dtype": None}).to(args[0].dtype)


def emptied(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without its values, as ``mode`` would take it itself. Relies on: its converter."""
    return mode.fake_tensor_converter.from_real_tensor(mode, tensor)


@contextmanager
def quiet() -> Iterator[None]:
    """Shapes that do not fit are no news inside. Relies on: the logger of this module's name tells of them."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@probed("FakeTensorMode", "computes without values")
def probe() -> None:
    """Compute a product without values, and a value of it."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        product = torch.empty(2, 3) @ torch.ones(3, 4)
        expect(isinstance(product, FakeTensor) and product.shape == (2, 4), "the shape of a product")
        with suppress(*UNKNOWN_VALUE):
            product.sum().item()
            expect(False, "what is raised where a value is needed")
