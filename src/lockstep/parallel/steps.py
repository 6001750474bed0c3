"""The steps of ``parallelize``, each by the files of its own strategy, which are imported when it is asked for."""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import nn

from lockstep.config.enums import Activation, DDPCommunicationHookType
from lockstep.config.fp8 import AORecipeKwargs
from lockstep.config.parallel import Parallel
from lockstep.config.world import ParallelDims
from lockstep.errors import UsageError
from lockstep.model.changes import disable_cache, mark_partial_state
from lockstep.offload.files.direct import OffloadedParameters
from lockstep.parallel.autocast import autocast_forward
from lockstep.parallel.gradient_mean import GradientAllReduce, ReplicaGroup
from lockstep.parallel.materialize import is_on_meta, materialize
from lockstep.parallel.model_options import ModelOptions
from lockstep.parallel.parallel_model import (
    PipelinedModel,
    ShardedModel,
    unwrap,
)
from lockstep.parallel.recompute import apply_activation_checkpointing
from lockstep.parallel.regional_compile import compile_regions
from lockstep.parallel.sync_batchnorm import synchronize_batchnorm
from lockstep.runtime.mesh import DeviceMeshes
from lockstep.runtime.process import Runtime
from lockstep.torch_internals import autograd as torch_autograd
from lockstep.torch_internals import compile as torch_compile
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals import tensors as torch_tensors

logger = logging.getLogger(__name__)


def probe_engines(parallel: Parallel, axes: ParallelDims) -> None:
    """Refuse a torch of unknown shape before anything is changed: on every rank, as all have the same.

    Raises:
        UsageError: an engine that this model needs does not behave as it is relied on.
    """
    torch_modules.probe()
    torch_tensors.probe()
    torch_autograd.probe()
    torch_compile.probe()
    if axes.pp > 1:
        from lockstep.torch_internals import fake, pipelining

        pipelining.probe()
        fake.probe()
    if axes.cp > 1:
        from lockstep.torch_internals import kernels

        kernels.probe()
    if parallel.activation is not Activation.NONE:
        from lockstep.torch_internals import dispatch

        dispatch.probe()
    if axes.splits_model:
        from lockstep.torch_internals import dtensor

        dtensor.probe()


def refuse_transforms(module: nn.Module, *_: object) -> None:
    """Run as a forward pre-hook of a model whose forward is split. Raises UsageError."""
    if not torch.compiler.is_compiling() and torch_autograd.is_transformed():
        raise UsageError(
            f"{type(unwrap(module)).__name__} was called inside of torch.func (grad, jvp, vmap, jacrev, ...) or of "
            "forward-mode differentiation, which cannot see what the ranks of a split model send each other. "
            "Differentiate with accelerator.backward(), give the model one more dimension instead of vmap, or use "
            "parallel='ddp'."
        )


def convert_to_float8(model: nn.Module, recipe: AORecipeKwargs) -> None:
    # Imported here, because torchao takes a second to import.
    from lockstep.parallel.float8 import convert

    convert(model, recipe)


def share_statistics(model: nn.Module, runtime: Runtime, options: ModelOptions) -> None:
    changed = synchronize_batchnorm(model, options.meshes.gradient_group)
    if not changed and runtime.is_main:
        logger.warning(
            "sync_batchnorm has no effect, because %s has no batch normalisation.", type(model).__name__
        )


def should_shard(model: nn.Module, options: ModelOptions) -> bool:
    has_parameters = next(nn.Module.parameters(model), None) is not None
    return options.parallel.shards and options.meshes.gradient_size > 1 and has_parameters


def refuse_communication_hook(options: ModelOptions) -> None:
    if options.ddp.comm_hook != DDPCommunicationHookType.NO:
        raise UsageError(
            f"comm_hook={options.ddp.comm_hook} compresses what DistributedDataParallel averages, but "
            f"parallel='{options.parallel}' averages gradients without it. Drop the hook, or drop tp, pp and ep."
        )


def split_layers(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    options: ModelOptions,
    runtime: Runtime,
    tensor_plan: object = None,
) -> list[nn.Parameter]:
    """Split layers, experts and the sequence, and let blocks recompute, in place. Returns the experts' weights.

    ``tensor_plan``: that of a whole model of which this is a part.
    """
    parallel, meshes = options.parallel, options.meshes
    experts: list[nn.Parameter] = []
    # Imported here, because torch's DTensor takes most of a second to import.
    if (mesh := meshes.axis("tp")) is not None:
        from lockstep.parallel.tensor.apply import tensor_parallel

        plan = tensor_parallel(model, mesh, _tensor_options(blocks, options, runtime, tensor_plan))
        if runtime.is_main and tensor_plan is None and parallel.tp_plan is None:
            logger.warning("%s is split over %d ranks: %s", type(model).__name__, mesh.size(), plan)
    if (mesh := meshes.axis("ep")) is not None:
        from lockstep.parallel.expert.apply import expert_parallel

        experts = expert_parallel(model, mesh)
    elif meshes.gradient_size > 1 and meshes.axes.pp == 1:
        _share_routing(model, meshes)
    if (mesh := meshes.axis("cp")) is not None:
        from lockstep.parallel.context.apply import context_parallel

        context_parallel(model, blocks, mesh, parallel.cp_method)
    apply_activation_checkpointing(model, parallel.activation, blocks)
    return experts


def _tensor_options(
    blocks: dict[str, nn.Module], options: ModelOptions, runtime: Runtime, plan: Any = None
) -> Any:
    from lockstep.parallel.tensor.apply import TensorOptions

    parallel = options.parallel
    asked = parallel.tp_plan if isinstance(parallel.tp_plan, str) else dict(parallel.tp_plan or ())
    return TensorOptions(
        plan=plan or asked or "auto",
        sequence_parallel=parallel.sequence_parallel,
        loss_parallel=parallel.loss_parallel,
        is_main=runtime.is_main,
        blocks=blocks or None,
    )


def _share_routing(model: nn.Module, meshes: DeviceMeshes) -> None:
    """Balance experts over the batches of all ranks, as one process would."""
    from lockstep.parallel.expert.layer import layers

    if any(layers(model)):
        from lockstep.parallel.expert.apply import share_routing

        share_routing(model, meshes.gradient_group)


def split_into_stages(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    runtime: Runtime,
    options: ModelOptions,
    shards: bool,
    evaluation_mode: bool,
) -> PipelinedModel:
    """Return this rank's stages. What comes after splitting follows in the first forward, which says who has what."""
    from lockstep.parallel.pipeline import PipelineOptions, split_model

    parallel, meshes = options.parallel, options.meshes
    mesh = meshes.axis("pp")
    assert mesh is not None
    plan = None
    # While the model is whole: blocks of other stages are about to leave it.
    if meshes.axes.tp > 1:
        from lockstep.parallel.tensor.apply import make_plan

        plan = make_plan(model, meshes.axes.tp, _tensor_options(blocks, options, runtime), blocks)
    if not evaluation_mode:
        disable_cache(model, "every stage would keep keys and values, and send them with its outputs")
    pipeline = split_model(
        model,
        blocks,
        mesh,
        PipelineOptions(
            schedule=parallel.schedule,
            micro_batches=parallel.micro_batches,
            stages_per_rank=parallel.stages_per_rank,
            split=parallel.split,
            batch_dims=parallel.batch_dims,
            loss_reduction=cast("Any", parallel.loss),
            loss_scale=options.loss_scale,
            forward_dtype=_gathered_dtype(options) if shards else None,
        ),
        runtime.device,
    )
    model.register_state_dict_post_hook(mark_partial_state)
    local = pipeline.local_blocks()
    split_layers(model, local, options, runtime, None if plan is None else plan.within(model))
    if options.compile_options is not None:
        compile_regions(local.values(), options.compile_options)

    prepared = PipelinedModel(pipeline)

    # Only the first forward tells which tensors, and so which parameters, each stage has.
    def finish_stages() -> None:
        if shards:
            _refuse_shared(pipeline.shared_between_stages(), parallel)
            prepared.stages = [
                shard_model(stage, pipeline.blocks_of(stage), runtime, options, is_filled=True)
                for stage in pipeline.stage_modules()
            ]
        elif not evaluation_mode:
            prepared.mean = average_gradients(pipeline, [], options)

    pipeline.on_settled(finish_stages)
    autocast_forward(pipeline, options.mixed_precision, runtime.device, options.autocast)
    return prepared


def _gathered_dtype(options: ModelOptions) -> torch.dtype | None:
    """Return that of parameters in forwards of a sharded model; None: their own."""
    from lockstep.parallel.zero.apply import DTYPES

    return DTYPES.get(options.mixed_precision)


def _refuse_shared(names: list[str], parallel: Parallel) -> None:
    if names:
        raise UsageError(
            f"{len(names)} parameters ('{names[0]}', ...) are used by several stages of one rank, but "
            f"zero={parallel.zero} shards each stage separately. Use schedule=1f1b or gpipe, untie these "
            "weights, or drop zero."
        )


def offload_parameters(model: nn.Module, runtime: Runtime, options: ModelOptions) -> None:
    """Keep the parameters in host memory or in a file. What computes with them brings them to the device."""
    folder = options.parallel.params_folder
    offloaded = (
        None
        if folder is None
        else OffloadedParameters((p.nbytes for p in nn.Module.parameters(model)), folder)
    )
    if offloaded is not None or is_on_meta(model):
        host = torch.device("cpu")
        materialize(model, host, options.init_weights, runtime.world_size, offloaded)
    if offloaded is not None:
        offloaded.close()


def shard_model(
    model: nn.Module, blocks: dict[str, nn.Module], runtime: Runtime, options: ModelOptions, is_filled: bool
) -> ShardedModel:
    # Imported here, because torch's sharding takes most of a second to import.
    from lockstep.parallel.zero.apply import shard

    return ShardedModel(model, *shard(model, blocks, runtime, options, is_filled))


def average_gradients(
    model: nn.Module, experts: list[nn.Parameter], options: ModelOptions
) -> GradientAllReduce:
    """Average gradients after backward: of experts among the ranks that hold the same ones."""
    from lockstep.parallel.zero.sharding import broadcast_buffers, synchronised_buffers

    meshes, axes = options.meshes, options.meshes.axes
    ids = {id(parameter) for parameter in experts}
    others = [parameter for parameter in nn.Module.parameters(unwrap(model)) if id(parameter) not in ids]
    mean = GradientAllReduce(
        [
            ReplicaGroup(others, meshes.gradient_group, meshes.gradient_size),
            ReplicaGroup(experts, meshes.expert_replicas, axes.data // axes.ep),
        ]
    )
    buffers = synchronised_buffers(model)
    # As DDP does before a forward, which no engine of torch does for these models.
    if options.ddp.broadcast_buffers and buffers and meshes.gradient_size > 1:

        def take_buffers(*_: object) -> None:
            if not mean.is_in_no_sync:
                broadcast_buffers(buffers, meshes.gradient_group)

        model.register_forward_pre_hook(take_buffers, prepend=True)
    return mean
