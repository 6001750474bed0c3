"""Tensors without values: shapes, types and views as torch computes them, without memory. Their import is slow."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch._subclasses.fake_tensor import (
    FakeTensor as FakeTensor,
)
from torch._subclasses.fake_tensor import (
    FakeTensorMode as FakeTensorMode,
)
from torch.utils._pytree import tree_leaves as tree_leaves

from lockstep.torch_internals.versions import expect, probed

UNKNOWN_VALUE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""Relies on: what is raised where a value would be needed."""


@probed("FakeTensorMode", "computes without values")
def probe() -> None:
    """A product without values, and a value of it."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        left = torch.empty_strided((2, 3), (3, 1))
        product = left @ torch.ones(3, 4)
        expect(isinstance(left, FakeTensor) and isinstance(product, FakeTensor), "tensors without values")
        expect(product.shape == (2, 4), "the shape of a product")
        try:
            product.sum().item()
        except UNKNOWN_VALUE:
            raised = True
        else:
            raised = False
    expect(raised, "what is raised where a value is needed")
    expect(tree_leaves(((left,), {"a": product})) == [left, product], "the leaves of a container")
