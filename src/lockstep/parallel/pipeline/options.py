"""What a pipeline is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from lockstep.config.enums import Schedule

Outputs = Literal["auto", "all", "last"]
LossReduction = Literal["auto", "mean", "sum", "whole"]


@dataclass(frozen=True)
class PipelineOptions:
    """How a model is split by depth and in which order its stages work.

    Args:
        schedule: The order of forwards and backwards.
        micro_batches: Parts that a batch is cut into; 0: chosen (four for each rank, if the batch divides).
        stages_per_rank: Stages that each rank holds; 0: what the schedule needs.
        split: Names of the blocks at which stages begin, without the first; () balances the stages.
        block_costs: Cost of each block by name, for instance the seconds of ``block_seconds``, by which stages
            are balanced; None: bytes of parameters.
        whole: Names of keyword arguments that every micro-batch gets whole, even if their dim 0 is as long as
            the batch.
        batch_dims: ``name=dim`` or ``name=none`` for arguments: which dimension is cut into micro-batches; of those
            that are not named it is found.
        loss_reduction: What a loss that the model computes itself is over the batch. ``whole``: neither mean nor sum,
            so that what comes after the last block is computed on the whole batch at once. ``auto``: found.
        outputs: Which ranks get the model's outputs. ``all``: all. ``last``: the rank of the last stage, the
            others None. ``auto``: all, but only the loss where the model computes it for training.
        loss_scale: The factor (a power of two) by which losses are multiplied while gradients are computed in
            float16; it is divided out of the gradients again.
        forward_dtype: The type of parameters in forwards, where they are gathered in another than their own.
    """

    schedule: Schedule = Schedule.ONE_F_ONE_B
    micro_batches: int = 0
    stages_per_rank: int = 0
    split: tuple[str, ...] = ()
    block_costs: Mapping[str, float] | None = None
    whole: tuple[str, ...] = ()
    batch_dims: tuple[str, ...] = ()
    loss_reduction: LossReduction = "auto"
    outputs: Outputs = "auto"
    loss_scale: Callable[[], float] | None = None
    forward_dtype: torch.dtype | None = None
