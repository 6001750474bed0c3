"""A model split by depth: each rank holds some of its blocks, and micro-batches pass from rank to rank."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules
from lockstep.parallel.pipeline.apply import block_seconds, measured_split, split_model
from lockstep.parallel.pipeline.model import PipelineModel
from lockstep.parallel.pipeline.options import PipelineOptions

__all__ = ["PipelineModel", "PipelineOptions", "block_seconds", "measured_split", "split_model"]

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "batch_dims": ["argument_names", "find_batch"],
            "gradients": ["GradientAccumulator"],
            "micro_batch": ["count_for_evaluation", "count_for_training", "ModelCall"],
            "options": ["balanced", "rank_of_stage"],
        },
    )
