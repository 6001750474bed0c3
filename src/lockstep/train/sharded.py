"""Optimizers of sharded parameters: which work, and how they get the parameters that took the others' place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.comm.dtensor import is_dtensor, shard_like
from lockstep.errors import UsageError

ADAMS = (torch.optim.Adam, torch.optim.AdamW)

# Classes that look at more of a parameter than single elements, in ways that DTensor has no rule for.
UNSUPPORTED = {
    "Adafactor": "AdamW, whose state is sharded too",
    "Rprop": "SGD or AdamW",
    "LBFGS": "SGD or AdamW",
    "SparseAdam": "AdamW",
}


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise UsageError for a class that cannot step on shards."""
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    for name, instead in UNSUPPORTED.items():
        if name in names and any(is_dtensor(p) for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                f"{name} cannot step on sharded parameters: it works on whole ones. Use {instead}, or parallel='ddp'."
            )
    if "Muon" in names:
        _check_rows(optimizer)


def _check_rows(optimizer: Optimizer) -> None:
    """Muon multiplies whole matrices; what it returns for one with fewer rows than ranks, torch does not shard."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if is_dtensor(p)):
        ranks = parameter.device_mesh.size(-1)
        if parameter.shape[0] < ranks:
            raise UsageError(
                f"Muon cannot step on a matrix of shape {tuple(parameter.shape)} sharded over {ranks} ranks, which has "
                "fewer rows than that. Leave it to AdamW, or use replicate=... for smaller groups of ranks."
            )


def replace_parameters(optimizer: Optimizer, replaced: Mapping[Any, torch.Tensor | None]) -> None:
    """Put new parameters in the places of old ones, in all groups and with their state, sharded alike.

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
                optimizer.state[new] = {name: _laid_out_as(value, new) for name, value in state.items()}
        if len(stay) < len(group["params"]):
            for key in {"params", "param_names"} & group.keys():
                group[key] = [group[key][place] for place in stay]


def _laid_out_as(value: Any, parameter: torch.Tensor) -> Any:
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


def _lacks_fused(optimizer: Optimizer) -> bool:
    """Whether DTensor has no rule for its fused operation; the numbers of the others are the same."""
    return isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad))


def _has_tensors(group: Mapping[str, Any]) -> bool:
    numbers = [group.get("lr"), *(group.get("betas") or ())]
    return any(isinstance(number, torch.Tensor) for number in numbers)
