"""Tensor parallelism: each rank holds a part of the matrices of a layer and computes a part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "apply": ["make_plan", "tensor_parallel", "TensorOptions"],
            "communication": ["scatter_sequence"],
            "hooks": ["ColumnRowRegion"],
            "infer": ["infer_plan"],
            "loss": ["handle_split_logits", "vocab_parallel_cross_entropy"],
            "modules": ["ParallelModuleSpec"],
            "parameters": ["zero_placement"],
        },
    )
