"""Names of files and lists of words that scripts import from ``accelerate.utils.constants``."""

from __future__ import annotations

from lockstep.checkpoint.weights import INDEX as SAFE_WEIGHTS_INDEX_NAME
from lockstep.checkpoint.weights import PICKLED_INDEX as WEIGHTS_INDEX_NAME
from lockstep.checkpoint.weights import PICKLED_WEIGHTS as WEIGHTS_NAME
from lockstep.checkpoint.weights import WEIGHTS as SAFE_WEIGHTS_NAME

OPTIMIZER_NAME = "optimizer"
FSDP_MODEL_NAME = "pytorch_model_fsdp"

FSDP_SHARDING_STRATEGY = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]


__all__ = [
    "FSDP_AUTO_WRAP_POLICY",
    "FSDP_MODEL_NAME",
    "FSDP_SHARDING_STRATEGY",
    "OPTIMIZER_NAME",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
]
