"""The order in which a model is made ready. What each step does is in ``steps.py``.

linear layers in 8 bits (fp8) → blocks → batch normalisation over ranks → values → stages (pp) → layers (tp)
→ experts (ep) → sequence (cp) → recompute
sharded models:  → compile → shard (zero) → autocast
others:          → compile blocks → parameters to the device, to host memory or a file (offload) → autocast
                 → compile the whole
                 → replicate (ddp), or average gradients after backward
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lockstep.config.enums import Activation, Strategy
from lockstep.model.blocks import find_blocks
from lockstep.parallel.autocast import autocast_forward
from lockstep.parallel.ddp.apply import data_parallel, distributed_data_parallel, has_trained_parameters
from lockstep.parallel.materialize import check_same_model, is_on_meta, materialize
from lockstep.parallel.model_options import ModelOptions
from lockstep.parallel.parallel_model import ParallelModel, ReplicatedModel, SplitModel
from lockstep.parallel.parameter_hooks import refuse_hooks
from lockstep.parallel.regional_compile import WHOLE, compile_regions, find_regions
from lockstep.parallel.save_pretrained import refuse_parts
from lockstep.parallel.steps import (
    average_gradients,
    convert_to_float8,
    offload_parameters,
    probe_engines,
    refuse_communication_hook,
    shard_model,
    share_statistics,
    should_shard,
    split_into_stages,
    split_layers,
)
from lockstep.runtime.process import Runtime


def parallelize(
    model: nn.Module,
    runtime: Runtime,
    options: ModelOptions,
    device_placement: bool = True,
    evaluation_mode: bool = False,
    before_split: Callable[[], None] = lambda: None,
) -> ParallelModel:
    """Return the model as the training loop calls it (its ``module``), and what else is asked of it.

    With ``evaluation_mode`` the model is neither replicated with gradients nor sharded: each rank just calls it, or
    its part of it. ``before_split`` is called when the model is on its device and still whole.
    """
    parallel, axes = options.parallel, options.meshes.axes
    probe_engines(parallel, axes)
    divides_weights = parallel.divides_weights
    shards = should_shard(model, options) and not evaluation_mode
    # The whole model.
    if options.fp8 is not None:
        convert_to_float8(model, options.fp8)
    needs_blocks = shards or axes.pp * axes.cp > 1 or parallel.activation is not Activation.NONE
    blocks = find_blocks(model, parallel.blocks) if needs_blocks else {}
    if (shards or divides_weights) and runtime.world_size > 1 and not evaluation_mode:
        refuse_hooks(model, parallel, runtime.world_size)
    if parallel.sync_batchnorm and not evaluation_mode and options.meshes.gradient_size > 1:
        share_statistics(model, runtime, options)
    if divides_weights:
        refuse_communication_hook(options)
        check_same_model(model, runtime.world_size)
        materialize(model, runtime.device, options.init_weights, runtime.world_size)
    compiled: tuple[str, ...] = ()
    if options.compile_options is not None and axes.pp == 1:
        in_parts = blocks if shards or divides_weights else {}
        compiled = find_regions(model, parallel, options.compile_blocks, in_parts)
    before_split()
    # Its parts, of which each rank has some.
    if axes.pp > 1:
        return split_into_stages(model, blocks, runtime, options, shards, evaluation_mode)
    experts = split_layers(model, blocks, options, runtime)
    if shards or divides_weights or compiled != WHOLE:
        compile_regions(map(model.get_submodule, compiled), options.compile_options or {})
    # Sharded models.
    if shards:
        sharded = shard_model(model, blocks, runtime, options, is_filled=divides_weights)
        autocast_forward(model, options.mixed_precision, runtime.device, options.autocast)
        return sharded
    # All others.
    if parallel.offloads_params:
        offload_parameters(model, runtime, options)
    elif is_on_meta(model):
        materialize(model, runtime.device, options.init_weights, runtime.world_size)
    if device_placement and not parallel.offloads_params:
        model = model.to(runtime.device)
    model = autocast_forward(model, options.mixed_precision, runtime.device, options.autocast)
    if compiled == WHOLE and not divides_weights:
        model = torch.compile(model, **(options.compile_options or {}))  # type: ignore[assignment]
    if evaluation_mode:
        return ParallelModel(model)
    if parallel.strategy is Strategy.DATA_PARALLEL:
        return ParallelModel(data_parallel(model, runtime))
    if divides_weights:
        refuse_parts(model)
        return SplitModel(model, average_gradients(model, experts, options))
    if runtime.world_size > 1 and has_trained_parameters(model):
        return ReplicatedModel(distributed_data_parallel(model, runtime, options.ddp))
    return ParallelModel(model)
