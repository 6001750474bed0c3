"""A model split by depth: each rank holds some of its blocks, and micro-batches pass from rank to rank."""

from lockstep.parallel.pipeline.apply import block_seconds, measured_split, split_model
from lockstep.parallel.pipeline.model import PipelineModel
from lockstep.parallel.pipeline.options import PipelineOptions

__all__ = ["PipelineModel", "PipelineOptions", "block_seconds", "measured_split", "split_model"]
