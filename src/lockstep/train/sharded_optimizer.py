"""Optimizers of sharded parameters: which work, and how they get the parameters that took the others' place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer

from lockstep.comm.dtensor import is_dtensor, local, shard_like
from lockstep.comm.tree import StateDict
from lockstep.config.parallel import Parallel
from lockstep.errors import UsageError
from lockstep.torch_internals.optim import step_on_parts
from lockstep.train.whole.kinds import is_elementwise, is_separable, place_of

ADAMS = (torch.optim.Adam, torch.optim.AdamW)


def check_optimizer(optimizer: Optimizer, parallel: Parallel) -> None:
    """Raise UsageError for an optimizer whose step nothing makes right where models are spread so."""
    name = type(optimizer).__name__
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if isinstance(optimizer, torch.optim.SparseAdam) and any(map(is_dtensor, parameters)):
        raise UsageError(
            f"{name} takes sparse gradients, but those of sharded parameters are dense. Use AdamW, whose state is "
            "sharded too, or parallel='ddp'."
        )
    if parallel.pp > 1 and not is_separable(optimizer):
        raise UsageError(
            f"{name} ({place_of(optimizer)}) is not known to update each parameter separately, but with "
            f"pp={parallel.pp} each rank updates only the parameters of its own stages. A norm, a line search or "
            "any other number over several parameters would cover only a part of the model. If it updates each "
            "element separately, set 'elementwise = True' in its class, which is checked. Or use zero or tp "
            "without pp, where such a step gets whole parameters."
        )
    if parallel.ep > 1 and not is_elementwise(optimizer):
        raise UsageError(
            f"{name} ({place_of(optimizer)}) is not known to update each element separately, but with "
            f"ep={parallel.ep} each rank updates only the experts that it holds. A norm or any other number over "
            "several elements would cover only a part of them. If it updates each element separately, set "
            "'elementwise = True' in its class, which is checked. Or use an optimizer of torch.optim such as "
            "AdamW, or zero without ep."
        )


def replace_parameters(
    optimizer: Optimizer, replaced: Mapping[object, torch.Tensor | None], lay_out: bool = True
) -> None:
    """Put new parameters in the places of old ones, in all groups and with their state, sharded alike if ``lay_out``.

    Those in whose place is None leave the optimizer.
    """
    for group in optimizer.param_groups:
        stay = []
        for place, old in enumerate(group["params"]):
            new = replaced.get(old, old)
            state = optimizer.state.pop(old, None) if new is not old else None
            if new is None:
                continue
            stay.append(place)
            group["params"][place] = new
            if state is not None:
                optimizer.state[new] = (
                    {name: _laid_out_as(value, new) for name, value in state.items()} if lay_out else state
                )
        # Names stand beside the parameters, place by place.
        if len(stay) < len(group["params"]):
            for key in {"params", "param_names"} & group.keys():
                group[key] = [group[key][place] for place in stay]


def _laid_out_as(value: object, parameter: torch.Tensor) -> object:
    if isinstance(value, torch.Tensor) and value.ndim and value.shape == parameter.shape:
        return shard_like(value, parameter)
    return value


def choose_implementation(optimizer: Optimizer, loss_is_scaled: bool = False) -> None:
    """Step on many shards in one operation, where nobody chose otherwise and the optimizer can.

    On the CPU Adam's fused form is the fastest, but with a scaled loss it would unscale by itself. A group
    that also holds tensors which are not sharded is stepped one by one: torch does not mix the two.
    """
    for group in optimizer.param_groups:
        if "foreach" not in group:
            continue
        sharded = [is_dtensor(p) for p in group["params"]]
        if any(sharded) and not all(sharded):
            group["foreach"] = False
            if "fused" in group:
                group["fused"] = False
        elif all(sharded) and sharded:
            if group.get("fused") and _lacks_fused(optimizer):
                group["fused"] = False
            if group["foreach"] is None and not group.get("fused"):
                # Rates and moments that are tensors have no such operation.
                one_by_one = group.get("differentiable") or group.get("capturable") or _has_tensors(group)
                on_cpu = all(p.device.type == "cpu" for p in group["params"])
                if on_cpu and isinstance(optimizer, ADAMS) and not (one_by_one or loss_is_scaled):
                    group["fused"] = True
                else:
                    group["foreach"] = not one_by_one


def step_without_dispatch(optimizer: Optimizer) -> None:
    """Let torch's Adam and AdamW step on this rank's parts: DTensor's dispatch takes half as long as the step."""
    # Not subclasses, whose steps may be others.
    if type(optimizer) in ADAMS:
        step_on_parts(optimizer, _local_parts)


def _local_parts(lists: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Return this rank's parts, unless a gradient or a state is laid out in another way than its parameter."""
    layouts = [_layout_of(parameter) for parameter in lists[0]]
    for tensors in lists[1:]:
        # A kind of state may be unused, and its list empty.
        for layout, tensor in zip(layouts, tensors, strict=False):
            if tensor.ndim and _layout_of(tensor) != layout:
                return lists
    return [[local(tensor) for tensor in tensors] for tensors in lists]


def _layout_of(tensor: torch.Tensor) -> tuple[object, object] | None:
    """Return its mesh and placements; None for what is no DTensor."""
    return (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None


def _lacks_fused(optimizer: Optimizer) -> bool:
    """Return whether DTensor has no rule for its fused operation; the numbers of the others are the same."""
    return isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad))


def _has_tensors(group: StateDict) -> bool:
    numbers = [group.get("lr"), *(group.get("betas") or ())]
    return any(isinstance(number, torch.Tensor) for number in numbers)
