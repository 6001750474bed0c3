"""Spread the experts of a model's mixture-of-experts layers over ranks, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.dtensor import is_dtensor
from lockstep.errors import CollectiveMismatchError, ConfigError, LockstepError, UsageError
from lockstep.model.blocks import joined_name
from lockstep.parallel.expert.collectives import Calls, ForwardEndHook, Ranks
from lockstep.parallel.expert.layer import Experts, MixtureOfExperts, layers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def expert_parallel(
    model: nn.Module, mesh: DeviceMesh, data_group: dist.ProcessGroup | None = None
) -> list[nn.Parameter]:
    """Keep num_experts / N of each layer's experts on each of the N ranks of ``mesh``. In place, collective.

    Each rank has its own batch. In a forward, rows travel to the ranks of their experts and back. The stacked
    parameters become DTensors, sharded on dim 0, with the values of the first rank of ``data_group``; their names
    stay. Routing is that of one process with the batches of all ranks of ``data_group`` one after the other:
    capacities, dropped tokens, losses.

    Gradients: every parameter's gradient is the mean of the local ones over those ranks that hold it. For those
    returned here these are the ranks of ``data_group`` with the same place in ``mesh`` (backward has divided by N),
    for all others all of ``data_group``.

    Args:
        mesh: One axis.
        data_group: The ranks that train on batches of their own; None: all ranks. ``mesh`` lies within it.

    Returns:
        The stacked parameters of all layers, as they are now.

    Raises:
        ConfigError: experts that do not divide by N.
        UsageError: no such layer, one that is spread already, one on the meta device; or other groups.
        CollectiveMismatchError: other layers on other ranks.
    """
    if mesh.ndim != 1:
        raise UsageError(
            f"expert_parallel got a mesh of {mesh.ndim} axes, but experts are divided over one axis. Pass "
            "mesh['ep']."
        )
    experts = mesh.get_group()
    data = _all_ranks() if data_group is None else data_group
    found = dict(layers(model))
    _together(data, found, _problem(model, found, experts, data))
    parameters = _spread(found, mesh, data)
    is_spread = experts.size() > 1
    most = max(layer.top_k * layer.num_experts for layer in found.values())
    calls = Calls(data, tuple(found), most) if is_spread else None
    for number, layer in enumerate(found.values()):
        ranks = Ranks(data, experts if is_spread else None, _members(experts, data), calls, number)
        layer.ranks = ranks if data.size() > 1 else None
    # A layer by itself has no forward around it that could end.
    if calls is not None and not isinstance(model, MixtureOfExperts):
        model.register_forward_hook(ForwardEndHook(calls))
    return parameters


def _spread(
    found: dict[str, MixtureOfExperts], mesh: DeviceMesh, data: dist.ProcessGroup
) -> list[nn.Parameter]:
    """Return this rank's parts of all stacked parameters; those that layers share are one."""
    made: dict[int, nn.Parameter] = {}
    for experts in {id(layer.experts): layer.experts for layer in found.values()}.values():
        for name, stacked in list(experts.named_parameters(recurse=False, remove_duplicate=False)):
            if id(stacked) not in made:
                _take_first_ranks_values(stacked, data)
                made[id(stacked)] = _local_experts(stacked, mesh)
                # Layers that share experts come to the new parameter next, which must stay.
                made[id(made[id(stacked)])] = made[id(stacked)]
            setattr(experts, name, made[id(stacked)])
        if mesh.size() > 1:
            # Tokens of all ranks come to an expert: its gradient is their sum, of which the mean is wanted.
            experts.gradient_factor = 1 / mesh.size()
    return list({id(parameter): parameter for parameter in made.values()}.values())


def share_routing(model: nn.Module, data_group: dist.ProcessGroup | None = None) -> None:
    """Route the batches of all ranks of ``data_group`` as one, where each rank holds all experts. In place, collective.

    Capacities and losses are those of one process with all these batches, one after the other. Only in training
    mode: in eval mode a rank may call the model alone. ``data_group`` None: all ranks.

    Raises:
        UsageError: no such layer, or one that is spread already.
        CollectiveMismatchError: other layers on other ranks.
    """
    data = _all_ranks() if data_group is None else data_group
    found = dict(layers(model))
    _together(data, found, _unfit(model, found))
    if data.size() > 1:
        for layer in found.values():
            layer.ranks = Ranks(data, None, ())


def _local_experts(stacked: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Return this rank's experts of a stacked parameter."""
    if mesh.size() == 1:
        return stacked
    from torch.distributed.tensor import DTensor, Shard

    mine = stacked.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
    sharded = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
    return nn.Parameter(sharded, stacked.requires_grad)


def _all_ranks() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


@torch.no_grad()
def _take_first_ranks_values(stacked: nn.Parameter, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.broadcast(stacked.data, group=group, group_src=0)


def _members(experts: dist.ProcessGroup, data: dist.ProcessGroup) -> tuple[int, ...]:
    """Return where the ranks of ``experts`` are in ``data``."""
    places = {rank: place for place, rank in enumerate(dist.get_process_group_ranks(data))}
    return tuple(places[rank] for rank in dist.get_process_group_ranks(experts))


def _problem(
    model: nn.Module,
    found: dict[str, MixtureOfExperts],
    experts: dist.ProcessGroup,
    data: dist.ProcessGroup,
) -> LockstepError | None:
    inner, outer = (dist.get_process_group_ranks(group) for group in (experts, data))
    if not set(inner) <= set(outer):
        return UsageError(
            f"Experts are spread over the ranks {inner}, but batches come from the ranks {outer}. "
            "Pass a data_group that contains the mesh."
        )
    for name, layer in found.items():
        if layer.num_experts % len(inner):
            return ConfigError(
                f"'{name}' has {layer.num_experts} experts, which do not divide by the {len(inner)} ranks of ep "
                f"({layer.num_experts} / {len(inner)} is not whole). Choose ep among the divisors of "
                f"{layer.num_experts}, or another number of experts."
            )
    return _unfit(model, found)


def _unfit(model: nn.Module, found: dict[str, MixtureOfExperts]) -> LockstepError | None:
    if not found:
        others = _of_others(model)
        return UsageError(
            f"{type(model).__name__} has no MixtureOfExperts whose experts can be divided{others}. Use "
            "lockstep.nn.MixtureOfExperts in the model, or use zero=3 instead of ep, which splits any weights."
        )
    for name, layer in found.items():
        unfit = _unfit_part(name, layer) or _used_elsewhere(name, layer, model, found)
        if unfit is not None:
            return unfit
        stacked = list(layer.experts.parameters(recurse=False))
        if layer.ranks is not None or any(is_dtensor(parameter) for parameter in stacked):
            return UsageError(
                f"The experts of '{name}' are spread over ranks already. Prepare a model once, and leave its "
                "experts out of other plans."
            )
        if any(parameter.is_meta for parameter in stacked):
            return UsageError(
                f"The experts of '{name}' are on the meta device, without values. Build them on a real device."
            )
    return None


def _of_others(model: nn.Module) -> str:
    """Name what looks like experts of another library."""
    for name, module in model.named_modules():
        if "expert" in type(module).__name__.lower() or name.rpartition(".")[2] == "experts":
            return f" ('{name}', a {type(module).__name__}, is none)"
    return ""


def _unfit_part(name: str, layer: MixtureOfExperts) -> UsageError | None:
    """Experts that are not those of ``MixtureOfExperts``, or have something that cannot be dealt out."""
    if not isinstance(layer.experts, Experts):
        return UsageError(
            f"The experts of '{name}' are a {type(layer.experts).__name__}, which cannot be divided over ranks. "
            "Keep the experts of MixtureOfExperts, or use a subclass of their class."
        )
    parts = [*layer.experts.named_parameters(), *layer.experts.named_buffers()]
    for part, tensor in parts:
        if tensor.shape[:1] != (layer.num_experts,) or "." in part or not isinstance(tensor, nn.Parameter):
            return UsageError(
                f"'{name}.experts.{part}' is {list(tensor.shape)}, but each parameter of the experts must have "
                f"one row for each of the {layer.num_experts} experts. Move other parameters from the experts to "
                "the layer."
            )
    return None


def _used_elsewhere(
    name: str, layer: MixtureOfExperts, model: nn.Module, found: dict[str, MixtureOfExperts]
) -> UsageError | None:
    """Weights of experts that another module uses, too, which would keep the whole ones."""
    stacked = {id(parameter) for parameter in layer.experts.parameters()}
    of_experts = {id(other.experts) for other in found.values()}
    for prefix, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            if id(parameter) in stacked and id(module) not in of_experts:
                full = joined_name(prefix, own)
                return UsageError(
                    f"'{full}' is also a weight of the experts of '{name}', and each rank holds only a part of "
                    f"that. Give '{full}' a weight of its own."
                )
    return None


def _together(
    group: dist.ProcessGroup, found: dict[str, MixtureOfExperts], problem: LockstepError | None
) -> None:
    """Raise on all ranks what one has found, and where they have different layers."""
    # A rank that has found a problem takes part too: the others would wait for it.
    mine = (
        None if problem is None else f"{type(problem).__name__}: {problem}",
        [f"{name} {layer} {next(layer.experts.parameters()).dtype}" for name, layer in found.items()]
        if problem is None
        else [],
    )
    every = [mine] * group.size()
    dist.all_gather_object(every, mine, group=group)
    if problem is not None:
        raise problem
    for rank, (message, theirs) in enumerate(every):
        if message is not None:
            raise UsageError(f"Rank {rank} of the group cannot spread its experts: {message}")
        if theirs != every[0][1]:
            raise CollectiveMismatchError(
                f"Rank 0 of the group has {len(every[0][1])} mixture-of-experts layers and rank {rank} has "
                f"{len(theirs)}, or they differ in size. Build the same model on every rank."
            )
