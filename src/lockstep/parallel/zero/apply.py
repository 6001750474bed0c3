"""ZeRO: optimizer state, gradients and parameters sharded over the ranks, on torch's ``fully_shard``.

All stages keep parameters, gradients and optimizer state sharded between steps. Inside a step of k
micro-batches they differ:

    stage   whole parameters            gradients reduced          communication
    1       forward to end of step      once, at the end           1 all-gather, 1 reduce-scatter
    2       forward to end of step      at each micro-batch        1 all-gather, k reduce-scatters
    3       one group at a time         at each micro-batch        2k all-gathers, k reduce-scatters

A parameter that no rank has used gets no gradient (``unused.py``); no message is sent for that.

References: Rajbhandari et al., ZeRO, SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from lockstep.comm.dtensor import is_dtensor, shard_like
from lockstep.comm.tree import Kwargs
from lockstep.config.parallel import Parallel
from lockstep.errors import UsageError
from lockstep.offload.files.direct import OffloadedParameters
from lockstep.parallel.gradient_mean import GradientAllReduce, ReplicaGroup
from lockstep.parallel.materialize import (
    GroupValues,
    check_same_model,
    initialisers,
    modules_inside_out,
)
from lockstep.parallel.model_options import ModelOptions
from lockstep.parallel.parameter_hooks import refuse_other_parameters
from lockstep.parallel.zero.calls import without_views
from lockstep.parallel.zero.exchange import ShardCollective, exchange_on_cpu, quantize_collectives
from lockstep.parallel.zero.groups import FullyShardGroup, check_types, find_groups, stays_whole
from lockstep.parallel.zero.sharding import Sharding, offload_shards, synchronised_buffers
from lockstep.runtime.process import Runtime
from lockstep.torch_internals import fsdp2, fsdp2_probe
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals.dtensor_operators import behave_like_plain
from lockstep.torch_internals.fsdp2_gathered import ShardedModule
from lockstep.torch_internals.replaced_parameters import retire

if TYPE_CHECKING:
    from torch.distributed.tensor import Shard

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def shard(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    runtime: Runtime,
    options: ModelOptions,
    is_filled: bool,
) -> tuple[Sharding, GradientAllReduce]:
    """Shard ``model`` in place: its class becomes a subclass of itself, its parameters DTensors. Collective.

    ``groups.py`` says which parameters are gathered together. Parameters on the meta device get their values group by
    group, so that no rank ever holds more of the whole model than the root group and another one. All ranks take
    rank 0's values. Scalar (0-d) and empty parameters stay whole, under torch 2.11 those of whole numbers too. Using a
    parameter object from before is an error afterwards. An optimizer that still holds them is refused at its first
    step, see ``preparation/stepping.py``. ``is_filled``: the ranks of the group hold equal values already, maybe of one
    part of a model, split in other ways.

    Raises:
        UsageError: the ranks' models differ, trainable parameters of one group have several types, or nothing
            says how to initialise a model on the meta device.
    """
    fsdp2_probe.probe()
    _refuse_sparse(model, options.parallel)
    sources = 1 if is_filled else runtime.world_size
    if sources > 1:
        check_same_model(model, sources)
    values = GroupValues(runtime.device, initialisers(model, options.init_weights), sources)
    is_cast = DTYPES.get(options.mixed_precision) is not None
    groups = find_groups(model, blocks, options.parallel, is_cast, runtime.is_main)
    check_types(groups, is_filled)
    _fill_and_shard(model, groups, values, options)
    sharded = [module for module in model.modules() if fsdp2.is_sharded(module)]
    collectives = _set_collectives(model, sharded, groups, options)
    # Frozen ones too: a script may let them train later.
    whole = [parameter for parameter in nn.Module.parameters(model) if parameter.ndim == 0]
    sharding = Sharding(
        stage=options.parallel.zero,
        groups=sharded,
        whole=whole,
        buffers=synchronised_buffers(model) if options.ddp.broadcast_buffers else [],
        group=options.meshes.gradient_group,
        parallel=options.parallel,
        steps_in_background=options.parallel.offloads_optimizer,
        block_groups=[group.modules for group in groups if len(group.modules) > 1],
    )
    sharding.collectives = collectives
    _register_hooks(model, sharding)
    # Otherwise torch takes the module of the first forward for the root, maybe an inner one called by itself.
    fsdp2.lazy_init(model)
    replicas = ReplicaGroup(whole, options.meshes.gradient_group, options.meshes.shard_mesh.size())
    return sharding, GradientAllReduce([replicas])


def _fill_and_shard(
    model: nn.Module, groups: list[FullyShardGroup], values: GroupValues, options: ModelOptions
) -> None:
    """Give each group its values and shard it, before the next one gets its own. Collective."""
    offloaded = _offloaded(model, options)
    # By its last module, before which the order of construction has all others of the group.
    inner = {group.modules[-1]: group for group in groups[:-1]}
    inside = {module for group in groups[:-1] for module in group.members}
    waiting: list[nn.Module] = []
    # In the order of construction, so that the same seed gives the values of a model that is built whole.
    for module in modules_inside_out(model):
        group = inner.get(module)
        if group is not None:
            # Modules of the root group that were constructed before this one draw their random numbers first.
            values.fill(waiting)
            values.fill(group.members)
            _shard_group(group, options, is_root=False)
            if offloaded is not None:
                offload_shards(module, offloaded)
            waiting = []
        elif module not in inside:
            waiting.append(module)
    values.fill(waiting)
    # torch wants the root last: it takes the parameters that no inner group has taken.
    _shard_group(groups[-1], options, is_root=True)
    if offloaded is not None:
        offload_shards(model, offloaded)
        offloaded.close()


def _set_collectives(
    model: nn.Module, sharded: list[ShardedModule], groups: list[FullyShardGroup], options: ModelOptions
) -> list[ShardCollective]:
    """Return what gathers and reduces, and how early; the collectives that are ours."""
    parallel = options.parallel
    on_cpu = options.meshes.shard_mesh.device_type == "cpu"
    collectives = exchange_on_cpu(sharded, bool(parallel.hpz)) if on_cpu else []
    # After those for CPUs, which they replace.
    if parallel.quantized_weights or parallel.quantized_gradients:
        quantize_collectives(model, parallel.quantized_weights, parallel.quantized_gradients)
    if parallel.forward_prefetch:
        for this, following in itertools.pairwise(group.modules[0] for group in groups[:-1]):
            this.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
    for record in itertools.chain.from_iterable(map(fsdp2.param_groups, sharded)):
        fsdp2_probe.check_group(record)
    return collectives


def _register_hooks(model: nn.Module, sharding: Sharding) -> None:
    model.register_forward_pre_hook(sharding.before_forward, prepend=True)
    # The hooks run so: blocks left out are passed by, groups of blocks end, views go, torch's own, ours.
    if sharding.blocks.groups:
        model.register_forward_hook(sharding.blocks.end, prepend=True)
    model.register_forward_hook(sharding.skipped.forward_ends, prepend=True)
    model.register_forward_hook(sharding.after_forward, always_call=True)
    model.register_load_state_dict_pre_hook(partial(_shard_whole_tensors, sharding))
    for module in sharding.modules:
        # On the class that torch made for it, because ``copy`` asks the class.
        type(module).__deepcopy__ = _refuse_copy
    behave_like_plain(shard_like)
    refuse_other_parameters(model)


def _refuse_sparse(model: nn.Module, parallel: Parallel) -> None:
    for name, module in model.named_modules():
        is_sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        if is_sparse and module.weight.requires_grad:
            raise UsageError(
                f"'{name}' of {type(model).__name__} is an {type(module).__name__} with sparse=True, whose gradients "
                f"parallel='{parallel}' cannot cut into shards. Make it with sparse=False, or use parallel='ddp'."
            )


def _refuse_copy(model: nn.Module, _: object) -> object:
    raise UsageError(
        f"{type(model).__name__.removeprefix('FSDP')} is sharded and cannot be copied with copy.deepcopy. For an "
        "average of weights, keep {name: p.detach().clone() for name, p in model.named_parameters()}, which are "
        "shards. For a whole copy, copy the model before prepare(), and load accelerator.get_state_dict(model) into it."
    )


def _shard_whole_tensors(
    sharding: Sharding, model: nn.Module, state_dict: dict[str, object], prefix: str, *_: object
) -> None:
    """Let ``load_state_dict`` take whole tensors, such as those of a file: every rank has the same."""
    # torch would reshard each group only when it comes to it.
    sharding.reshard()
    for name, place in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        given = state_dict.get(prefix + name)
        if isinstance(given, torch.Tensor) and given.shape == place.shape:
            state_dict[prefix + name] = shard_like(given, place)


def _offloaded(model: nn.Module, options: ModelOptions) -> OffloadedParameters | None:
    """Return a file with room for this rank's shards, where they are to be in one."""
    folder = options.parallel.params_folder
    if folder is None:
        return None
    ranks = options.meshes.shard_mesh.size(-1)
    sharded = [parameter for parameter in nn.Module.parameters(model) if not stays_whole(parameter)]
    # Of the largest shard: torch gives the first ranks the rows that are left over.
    rows = (-(-parameter.shape[0] // ranks) for parameter in sharded)
    return OffloadedParameters(
        [n * parameter.nbytes // parameter.shape[0] for n, parameter in zip(rows, sharded, strict=True)],
        folder,
    )


def _shard_group(group: FullyShardGroup, options: ModelOptions, is_root: bool) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    parallel, mesh, modules = options.parallel, options.meshes.shard_mesh, group.modules
    before = {id(p): p for p in group.parameters()}
    arguments: Kwargs = {
        "mesh": mesh,
        "reshard_after_forward": _reshard_after_forward(parallel, is_root),
        "ignored_params": set(filter(stays_whole, before.values())),
        # A folder's shards are mapped files, which pinning would copy into memory.
        "offload_policy": CPUOffloadPolicy(
            pin_memory=mesh.device_type != "cpu" and parallel.params_folder is None
        )
        # An optimizer that steps in host memory needs its shards there.
        if parallel.offloads_params or (parallel.offloads_optimizer and mesh.device_type != "cpu")
        else OffloadPolicy(),
    }
    # Split by tp: ZeRO cuts the rows of this rank once more, but input features of a fused projection.
    if any(map(is_dtensor, before.values())):
        from lockstep.parallel.tensor.parameters import zero_placement

        _check_columns(before.values(), zero_placement, mesh.size(-1))
        arguments["shard_placement_fn"] = zero_placement
    # Kernels of batch normalisation want their weights in the type of the running statistics.
    compute = None if isinstance(modules[0], torch_modules.BatchNorm) else DTYPES.get(options.mixed_precision)
    # Without a word gradients are reduced in the type of the computation, which torch from 2.15 on does only if told.
    reduce = DTYPES[parallel.reduce] if parallel.reduce else compute
    if compute is not None:
        norms: list[nn.Module] = [
            member for member in group.members if isinstance(member, torch_modules.BatchNorm)
        ]
        if any(True for norm in norms for _ in norm.parameters()):
            # In a group of their own, because a group gathers in one type.
            fully_shard(norms, mp_policy=MixedPrecisionPolicy(), **arguments)
            for norm in norms:
                norm.register_forward_hook(without_views, prepend=True)
    policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=not options.autocast.enabled
    )
    fully_shard(modules if len(modules) > 1 else modules[0], mp_policy=policy, **arguments)
    for module in modules:
        # Before torch's own hook, which puts a hook on what this one returns.
        module.register_forward_hook(without_views, prepend=True)
    # An optimizer or a script may still hold the objects from before, whose use is an error from here on.
    now = set(map(id, group.parameters()))
    for old in before.values():
        if id(old) not in now and not is_dtensor(old):
            retire(old)


def _check_columns(
    parameters: Iterable[nn.Parameter], placement: Callable[[nn.Parameter], Shard], ranks: int
) -> None:
    for parameter in parameters:
        dim = placement(parameter).dim
        if dim > 0 and parameter.shape[dim] % ranks:
            raise UsageError(
                f"A fused projection of shape {tuple(parameter.shape)}, whose rows are divided by tp, is sharded "
                f"along its {parameter.shape[dim]} input features, but {parameter.shape[dim]} is not a multiple "
                f"of {ranks} ranks. Use replicate=... for groups of another size, or drop zero."
            )


def _reshard_after_forward(parallel: Parallel, is_root: bool) -> bool | int | None:
    if parallel.zero < 3:
        return False
    if is_root:
        # Backward begins with the root group, so torch keeps it gathered.
        return None
    return parallel.hpz or True
