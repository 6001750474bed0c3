"""``fully_shard``: the records behind a sharded module, and the gradients that it has not reduced yet.

A ``param`` is torch's ``FSDPParam``, the record of one parameter; a ``group`` its ``FSDPParamGroup``, the record of
those that are gathered together; the state is the ``FSDPState`` of one module.

Gradients that were not reduced to the shards of all ranks are kept in one of these places:

    whose                                    up to torch 2.14                    from 2.15 on
    this rank's own, type of the parameter   ``_unsharded_param.grad``           ``_unsharded_param.grad``
    this rank's own, type of the reduction   ``unsharded_accumulated_grad``      the same, which says ``grad_dtype``
    summed over one replica's shards         ``_partial_reduce_output``          the same, with a layout beside it

From 2.15 on ``unsharded_accumulated_grad`` is a property that shows ``_unsharded_param.grad`` once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.torch_internals.fsdp2_gathered import (
    GRAD,
    FSDPParam,
    FSDPParamGroup,
    ShardedModule,
)

# Records --------------------------------------------------------------------------------------------


def is_sharded(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to this module."""
    # Imported late: it takes most of a second.
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def param_groups(module: ShardedModule) -> list[FSDPParamGroup]:
    """Relies on: ``_get_fsdp_state()`` has ``_fsdp_param_groups``, up to 2.12 one ``_fsdp_param_group`` or None."""
    state = module._get_fsdp_state()
    many = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if many is None else many) if group is not None]


def shards_whole_numbers() -> bool:
    """Return whether parameters of integers can be sharded: up to 2.11 torch makes each shard one that trains, then
    asks."""
    return torch.torch_version.TorchVersion(torch.__version__) >= "2.12"


def params(group: FSDPParamGroup) -> list[FSDPParam]:
    """Relies on: ``fsdp_params`` are the group's records, in the order in which they are packed for collectives."""
    return list(group.fsdp_params)


def lazy_init(root: ShardedModule) -> None:
    """Relies on: ``_lazy_init`` makes this module the root of the sharded ones inside, and does nothing the next time.

    torch itself calls it in the first forward, and takes the module of that one for the root.
    """
    root._get_fsdp_state()._lazy_init()


def is_in_forward(root: ShardedModule) -> bool:
    """Relies on: ``_training_state`` is FORWARD from before a forward until its end, and stays so if it raised."""
    return bool(root._get_fsdp_state()._training_state._name_ == "FORWARD")


def pre_forward(
    root: ShardedModule, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Begin a forward of the sharded model with something else than its own ``forward``; (args, kwargs) for that.

    Relies on: ``_pre_forward`` and ``_post_forward`` may stand around any code, as torch's own
    ``register_fsdp_forward_method`` puts them around methods; forwards of the model inside change nothing.
    """
    args, kwargs = root._get_fsdp_state()._pre_forward(module, args, kwargs)
    return args, kwargs


def post_forward(root: ShardedModule, module: nn.Module, args: object, output: object) -> object:
    """End what ``pre_forward`` began; the output, with torch's hooks for backward."""
    return root._get_fsdp_state()._post_forward(module, args, output)


@contextmanager
def gathered_by_hand(root: ShardedModule, before_drop: Callable[[], None]) -> Iterator[None]:
    """Gather all weights of the sharded model once, and keep them so; forwards inside cast their inputs, and no more.

    ``before_drop`` is called inside where something would drop them, and may raise.

    Relies on: with ``_training_state`` PRE_BACKWARD, as in a forward that is computed again, the hooks around a
    forward gather only what is not gathered, shard nothing, and record nothing for backward. transformers asks
    ``_is_fsdp_managed_module`` whether ranks must generate in step.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    modules = [module for module in root.modules() if is_sharded(module)]
    # Modules that are gathered together have one state.
    states = dict.fromkeys(module._get_fsdp_state() for module in modules)
    managed = [module for module in root.modules() if "_is_fsdp_managed_module" in vars(module)]
    before = {state: state._training_state for state in states}
    try:
        for module in modules:
            module.unshard()
        for state in states:
            state._training_state = TrainingState.PRE_BACKWARD
        for module in managed:
            # With all weights there, no rank has to go on because of the others.
            module._is_fsdp_managed_module = False
        with ExitStack() as stack:
            for group in (group for module in modules for group in param_groups(module)):
                stack.enter_context(_calling(group, "_to_sharded", before_drop))
            yield
    finally:
        for state, known in before.items():
            state._training_state = known
        for module in managed:
            module._is_fsdp_managed_module = True


@contextmanager
def _calling(group: FSDPParamGroup, name: str, first: Callable[[], None]) -> Iterator[None]:
    """Call ``first`` inside before a method of the group."""
    method = getattr(group, name)

    def call() -> None:
        first()
        method()

    setattr(group, name, call)
    try:
        yield
    finally:
        setattr(group, name, method)


@torch.no_grad()
def write_back(group: FSDPParamGroup) -> None:
    """Let this rank's shards be what the gathered parameters are now, where these have all bits of the shards.

    Relies on: the parts of all ranks are gathered one after the other, each padded to ``padded_sharded_param_size``,
    cut along the first dimension but under tensor parallelism.
    """
    for param in group.fsdp_params:
        whole, part = param._unsharded_param.detach(), param.sharded_param._local_tensor
        if type(whole) is torch.Tensor and whole.dtype == part.dtype:
            # Rank r's part begins at r padded sizes; those of the last ranks are shorter, or empty.
            start = param.padded_sharded_param_size.numel() * group.mesh_info.shard_mesh_rank
            part.copy_(whole.reshape(-1)[start : start + part.numel()].view(part.shape))


def all_gather_group(group: FSDPParamGroup) -> Any:
    """Return the process group over which weights are gathered; None if they are not sharded.

    Relies on: ``mesh_info.shard_process_group``.
    """
    return getattr(group.mesh_info, "shard_process_group", None)


class Mesh(NamedTuple):
    """How many ranks a group's parameters are sharded over, this rank's index there, and how many replicas of that."""

    shape: tuple[int, ...]
    shards: int
    own_shard: int
    replicas: int


def mesh_of(group: FSDPParamGroup) -> Mesh:
    """Relies on: ``mesh_info`` with ``mesh``, ``shard_mesh_size``, ``shard_mesh_rank``, ``replicate_mesh_size``."""
    info = group.mesh_info
    shape = tuple(info.mesh.shape)
    return Mesh(
        shape, info.shard_mesh_size, info.shard_mesh_rank, int(getattr(info, "replicate_mesh_size", 1))
    )


def is_unsharded(group: FSDPParamGroup) -> bool:
    """Relies on: ``is_unsharded``: whole parameters stand in the module now."""
    return bool(group.is_unsharded)


def device_of(group: FSDPParamGroup) -> torch.device:
    """Relies on: ``device`` is where the group's collectives run."""
    device: torch.device = group.device
    return device


# Parameters ------------------------------------------------------------------------------------------


def sharded_param(param: FSDPParam) -> Any:
    """Return the DTensor that optimizers hold. Relies on: ``sharded_param`` is one object for a record's life."""
    return param.sharded_param


def unsharded_param(param: FSDPParam) -> Any:
    """Return the whole parameter, None before it was gathered once. Relies on: ``_unsharded_param``, made once."""
    return getattr(param, "_unsharded_param", None)


def forms(param: FSDPParam) -> Iterator[object]:
    """Return what stands in the module at some time. Relies on: ``_sharded_post_forward_param`` is the third."""
    for name in ("sharded_param", "_unsharded_param", "_sharded_post_forward_param"):
        found = getattr(param, name, None)
        if found is not None:
            yield found


def whole_numel(param: FSDPParam) -> int:
    """Relies on: ``_orig_size`` is the shape of the whole parameter."""
    return int(param._orig_size.numel())


def move_shard(param: FSDPParam, keep: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let ``keep`` (flat tensor -> the same in other memory) say where the shard lies from now on.

    Relies on: torch finds it in ``_sharded_param_data`` (flat, padded) and ``sharded_param._local_tensor``, which share
    their memory, and nowhere else.
    """
    kept = keep(param._sharded_param_data)
    local = param.sharded_param._local_tensor
    param._sharded_param_data = kept
    param.sharded_param._local_tensor = kept[: local.numel()].view(local.shape)


# Gradients that are not reduced yet -------------------------------------------------------------------


@cache
def accumulates_in_leaf() -> bool:
    """Return whether ``unsharded_accumulated_grad`` is only another name of ``_unsharded_param.grad``, as from 2.15
    on."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param as param_file

    return isinstance(vars(param_file.FSDPParam).get("unsharded_accumulated_grad"), property)


def unreduced_grads(param: FSDPParam) -> list[torch.Tensor]:
    """Return this rank's own gradients of the whole parameter, mostly one: their sum is still to be reduced.

    Relies on: up to 2.14 ``unsharded_accumulated_grad`` (type of the reduction) and ``_unsharded_param.grad`` are two
    tensors, of which both count; from 2.15 on there is only ``_unsharded_param.grad``.
    """
    found = []
    if not accumulates_in_leaf() and param.unsharded_accumulated_grad is not None:
        found.append(param.unsharded_accumulated_grad)
    whole = getattr(param, "_unsharded_param", None)
    if whole is not None and (gradient := GRAD.__get__(whole)) is not None:
        found.append(gradient)
    return found


def discard_unreduced_grad(param: FSDPParam) -> None:
    """Forget them."""
    whole = getattr(param, "_unsharded_param", None)
    if whole is not None:
        GRAD.__set__(whole, None)
    if not accumulates_in_leaf():
        param.unsharded_accumulated_grad = None


def partial_reduce_output(group: FSDPParamGroup) -> torch.Tensor | None:
    """Return the flat sum over one replica's shards, not reduced over the replicas yet.

    Relies on: ``_partial_reduce_output``; there is none but in groups with replicas.
    """
    output: torch.Tensor | None = group._partial_reduce_output
    return output


def discard_partial_reduce_output(group: FSDPParamGroup) -> None:
    """Forget it. Relies on: with None there the next reduction begins anew."""
    group._partial_reduce_output = None
