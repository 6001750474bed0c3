"""The order in which a model is made ready: the one file that knows every strategy.

blocks → recompute → compile → shard (or: device, replicate) → autocast
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.config.enums import Activation, Strategy
from lockstep.config.handlers import AutocastKwargs, DistributedDataParallelKwargs
from lockstep.config.parallel import Parallel
from lockstep.parallel.autocast import autocast_forward, remove_autocast
from lockstep.parallel.blocks import find_blocks
from lockstep.parallel.materialize import InitWeights, is_on_meta, materialize
from lockstep.parallel.recompute import recompute
from lockstep.parallel.replicate import data_parallel, distributed_data_parallel
from lockstep.parallel.sharding import sharding_of
from lockstep.runtime.process import Runtime


@dataclass(frozen=True)
class ModelOptions:
    """What ``spread`` does to a model. ``mesh``: of ``runtime.mesh.data_mesh``, where the model is sharded."""

    parallel: Parallel = field(default_factory=Parallel)
    mixed_precision: str = "no"
    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)
    ddp: DistributedDataParallelKwargs = field(default_factory=DistributedDataParallelKwargs)
    compile_options: dict[str, Any] | None = None
    mesh: Any = None
    init_weights: InitWeights | None = None


def spread(
    model: nn.Module,
    runtime: Runtime,
    options: ModelOptions,
    device_placement: bool = True,
    evaluation_mode: bool = False,
) -> nn.Module:
    """The model that the training loop calls. ``unwrap`` gives back the user's own object.

    With ``evaluation_mode`` the model is neither replicated with gradients nor sharded: each rank just calls it.
    """
    parallel = options.parallel
    shards = options.mesh is not None and not evaluation_mode and next(model.parameters(), None) is not None
    needs_blocks = shards or parallel.activation is not Activation.NONE
    blocks = find_blocks(model, parallel.blocks) if needs_blocks else {}
    recompute(model, parallel.activation, blocks)
    if shards:
        if options.compile_options is not None:
            for block in blocks.values() or [model]:
                block.compile(**options.compile_options)
        model = _shard(model, blocks, runtime, options)
        return autocast_forward(model, options.mixed_precision, runtime.device, options.autocast)
    if is_on_meta(model):
        materialize(model, runtime.device, options.init_weights, runtime.world_size)
    if device_placement:
        model = model.to(runtime.device)
    model = autocast_forward(model, options.mixed_precision, runtime.device, options.autocast)
    if options.compile_options is not None:
        model = torch.compile(model, **options.compile_options)  # type: ignore[assignment]
    if evaluation_mode:
        return model
    if parallel.strategy is Strategy.DATA_PARALLEL:
        return data_parallel(model, runtime)
    if runtime.world_size > 1:
        return distributed_data_parallel(model, runtime, options.ddp)
    return model


def hold_back(model: nn.Module, inside_window: bool) -> AbstractContextManager[Any]:
    """Backward inside adds to this rank's gradients without averaging them over all ranks.

    ``inside_window``: as a micro-batch of an accumulation window, in which a sharded model may keep its
    gradients sharded.
    """
    sharding = sharding_of(model)
    if sharding is not None:
        return sharding.inside_window() if inside_window else sharding.no_sync()
    if not hasattr(model, "no_sync"):
        return nullcontext()
    if getattr(model, "static_graph", False) and not getattr(model, "_saw_backward", False):
        # With a static graph DDP records the graph in its first backward, which must be a synchronised
        # one. Averaging early leaves the window's result the same: a mean of equal means is that mean.
        model._saw_backward = True  # type: ignore[assignment]
        return nullcontext()
    no_sync: Any = model.no_sync
    context: AbstractContextManager[Any] = no_sync()
    return context


def gradients(model: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors in which this rank accumulates the model's gradients now."""
    sharding = sharding_of(model)
    if sharding is not None:
        yield from sharding.gradients()
    else:
        yield from (p.grad for p in model.parameters() if p.grad is not None)


def unwrap(model: nn.Module, keep_autocast: bool = True, keep_compile: bool = True) -> nn.Module:
    """The user's own model inside what ``spread`` returned."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        model = model.module
    inner: nn.Module = getattr(model, "_orig_mod", model)  # of what torch.compile returns
    if not keep_autocast:
        remove_autocast(inner)
    return model if keep_compile else inner


def is_compiled_module(module: nn.Module) -> bool:
    """Whether ``torch.compile`` returned this module."""
    return hasattr(module, "_orig_mod")


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """``unwrap`` under the name and arguments that scripts know."""
    return unwrap(model, keep_autocast=keep_fp32_wrapper, keep_compile=keep_torch_compile)


def _shard(
    model: nn.Module, blocks: dict[str, nn.Module], runtime: Runtime, options: ModelOptions
) -> nn.Module:
    # Imported here, because torch's sharding takes most of a second to import.
    from lockstep.parallel.shard import ShardOptions, shard

    shard_options = ShardOptions(
        mesh=options.mesh,
        parallel=options.parallel,
        mixed_precision=options.mixed_precision,
        autocast=options.autocast.enabled,
        broadcast_buffers=options.ddp.broadcast_buffers,
        find_unused_parameters=options.ddp.find_unused_parameters,
        init_weights=options.init_weights,
    )
    return shard(model, blocks, runtime, shard_options)
