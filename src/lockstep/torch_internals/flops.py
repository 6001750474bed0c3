"""How many floating-point operations an operator takes: torch's own table, and what that lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.utils import flop_counter

from lockstep.torch_internals.dispatch import operators_of
from lockstep.torch_internals.versions import expect, probed

Formula = Callable[..., int]
"""Arguments of an operator, and ``out_val=`` what it returned -> floating-point operations."""


def of_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
) -> int:
    """Count the FLOPs of a forward over tensors [batch, heads, sequence, width], in full where it is causal, too."""
    return int(flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape))


def _vector_product(matrix: torch.Tensor, vector: torch.Tensor, *_: object, **__: object) -> int:
    return 2 * matrix.numel()


def _add_vector_product(_: torch.Tensor, matrix: torch.Tensor, *__: object, **___: object) -> int:
    return 2 * matrix.numel()


def _grouped_product(left: torch.Tensor, right: torch.Tensor, *_: object, **__: object) -> int:
    # Rows are divided among groups (left is 2-d), or each group has its own (3-d).
    rows = left.shape[-2] if left.dim() == 2 else left.shape[0] * left.shape[-2]
    # Both 2-d: groups divide the inner dimension, so each part of it is multiplied once.
    if left.dim() == 2 and right.dim() == 2:
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return int(2 * rows * left.shape[-1] * right.shape[-1])


OURS: Mapping[str, Formula] = {
    "_scaled_dot_product_flash_attention_for_cpu": of_attention,
    "_scaled_dot_product_fused_attention_overrideable": of_attention,
    "mv": _vector_product,
    "addmv": _add_vector_product,
    "_grouped_mm": _grouped_product,
}
"""Operators of ``torch.ops.aten`` that torch's own table lacks."""

ATTENTION_BACKWARDS = (
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
)
"""Gradient, query, key and value come first. They compute the scores again, which the forward has not kept: one product
in five."""

WITHOUT_FORMULA = (
    *("_cudnn_rnn", "mkldnn_rnn_layer", "miopen_rnn", "_cudnn_rnn_backward", "mkldnn_rnn_layer_backward"),
    *("_native_multi_head_attention", "_transformer_encoder_layer_fwd", "_sparse_mm", "_sparse_addmm"),
)
"""Operators of ``torch.ops.aten`` that compute much, and how much nobody says."""

HARMLESS = frozenset(
    ("aten", "prim", "prims", "rngprims", "c10d", "fsdp", "profiler", "_dtensor", "quantized_decomposed")
)
"""Namespaces of torch whose other operators move data, or compute element by element."""


def formulas() -> dict[object, Formula]:
    """Return the formulas by operator, without its overload. Relies on: ``flop_registry`` is such a mapping."""
    known: dict[object, Formula] = dict(flop_counter.flop_registry)
    for name, formula in OURS.items():
        known.update((operator, formula) for operator in operators_of((name,)))
    return known


@probed("flop counter", "counts operators")
def probe() -> None:
    """Count a product of matrices."""
    left, right = torch.ones(2, 3), torch.ones(3, 4)
    found = formulas()[torch.ops.aten.mm](left, right, out_val=left @ right)
    expect(found == 2 * 2 * 3 * 4, "the formula of a product")
