"""What of a training run is in a checkpoint: from the prepared objects of one rank to tensors and documents.

model.<i>.<name>                         weights and buffers
optimizer.<i>.state.<parameter>.<key>    state of optimizers, by the names of parameters
object.<i>.<path>                        tensors of registered objects, where ranks hold the same
rank.<r>.<path>                          tensors that one rank alone has

Where ranks have different blocks of a model, each collects its own, and ``global_state`` joins the documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.contents import CheckpointContents
from lockstep.checkpoint.format.codec import Document, encode
from lockstep.checkpoint.format.tensors import dtype_name
from lockstep.comm.dtensor import is_dtensor, local
from lockstep.errors import UsageError
from lockstep.runtime.seed import rng_state
from lockstep.torch_internals import modules as torch_modules
from lockstep.torch_internals import tensors as torch_tensors

COMMON, OF_RANK = ("scheduler", "scaler"), ("loader", "object", "window")


@dataclass
class RankState:
    """A run's state on one rank.

    ``tensors`` are common to all ranks that have them, ``of_first`` those that only the first of these may write,
    ``of_rank`` this rank's own. ``shared`` are in objects of each rank, which may hold the same, until
    ``split_divergent_state`` divides them. ``common`` and ``own`` are the documents of all ranks and of this one.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    of_first: dict[str, torch.Tensor] = field(default_factory=dict)
    of_rank: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, torch.Tensor] = field(default_factory=dict)
    common: Document = field(default_factory=dict)
    own: Document = field(default_factory=dict)
    ties: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Of models whose ranks have different blocks."""

    def replace_model(self, number: int, weights: dict[str, object] | None) -> None:
        """Save these whole weights of a model, or none of it, in place of what was collected."""
        prefixes = (f"model.{number}.", f"extra.{number}.")
        for tensors in (self.tensors, self.of_first):
            for name in [name for name in tensors if name.startswith(prefixes)]:
                del tensors[name]
        if weights is None:
            del self.common["models"][str(number)]
        else:
            self.common["models"][str(number)] = collect_weights(weights, set(), number, self)


@torch.no_grad()
def collect(contents: CheckpointContents, rank: int) -> RankState:
    """Collect the state of the run on this rank; tensors are not copied.

    Raises:
        UsageError: a state holds what no checkpoint can.
    """
    found = RankState(ties={number: whole.ties for number, whole in contents.whole.items()})
    found.common = {"contents": contents.counts(), "models": {}}
    for i, model in enumerate(contents.models):
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        found.common["models"][str(i)] = collect_weights(model.state_dict(), parameters, i, found)
    names = ParameterNames(contents.models, found.ties)
    for name, optimizer in contents.stateful("optimizer"):
        found.common[name] = encode_optimizer(optimizer, names.by_group(optimizer), found.tensors, name)
        if contents.whole and not found.common[name]["by_name"]:
            raise UsageError(
                f"{name} is a {type(optimizer).__name__}, whose state does not name its parameters, so the "
                "states of a pipeline's ranks cannot be joined. Use an optimizer with torch's form of state_dict()."
            )
    for name, item in contents.stateful(*COMMON):
        found.common[name] = encode(item.state_dict(), found.tensors, name)
    collect_random(found, rank)
    if contents.place is not None:
        found.own["place"] = asdict(contents.place)
    for name, item in contents.stateful(*OF_RANK):
        found.own[name] = _collect_of_rank(item, name, rank, found)
    for name, tensor in (*found.tensors.items(), *found.of_first.items(), *found.shared.items()):
        dtype_name(tensor, name)
        if tensor.is_meta:
            raise UsageError(
                f"{name} is on the meta device, so it has no values. Give it values before you save."
            )
    return found


def collect_random(found: RankState, rank: int) -> None:
    """Note where this rank's random number generators stand."""
    found.own["rng"] = encode(rng_state(), found.of_rank, f"rank.{rank}.rng")


def _collect_of_rank(item: Any, name: str, rank: int, found: RankState) -> object:
    tensors: dict[str, torch.Tensor] = {}
    document = encode(item.state_dict(), tensors, name)
    names = {}
    for path, tensor in tensors.items():
        names[path] = path
        if is_dtensor(tensor):
            found.tensors[path] = tensor
        elif name.startswith("object."):
            found.shared[path] = tensor
        else:
            names[path] = f"rank.{rank}.{path}"
            found.of_rank[names[path]] = tensor
    return rename_tensors(document, names)


def collect_weights(
    weights: Mapping[str, object], parameters: set[str], number: int, found: RankState
) -> dict[str, object]:
    """Return names of tied weights by the first name of each, and what is no tensor, as JSON."""
    first_names: dict[object, str] = {}
    ties = found.ties.get(number, {})
    document: Document = {"ties": {}, "extra": {}}
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor) or is_extra(name):
            document["extra"][name] = encode(value, found.of_first, f"extra.{number}.{name}")
            continue
        # Empty tensors have no memory by which a tie could be seen.
        here = first_names.setdefault(memory_key(value), name) if value.numel() else name
        # The first name may be one on another rank.
        first = ties.get(here, here)
        if first != name:
            document["ties"][name] = first
        # A tied weight is saved once, under its first name.
        if here != name:
            continue
        # Parameters and DTensors agree on all ranks that have them; copies of buffers may differ.
        if name in parameters or is_dtensor(value):
            found.tensors[f"model.{number}.{first}"] = value
        else:
            found.of_first[f"model.{number}.{first}"] = value
    return document


def is_extra(name: str) -> bool:
    """Return whether an entry of a module's ``state_dict`` is what its ``get_extra_state`` returned."""
    return name.split(".")[-1] == torch_modules.EXTRA_STATE


def memory_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same elements of memory, with the same signs."""
    part = local(tensor)
    signs = part.is_conj(), part.is_neg()
    return (
        torch_tensors.storage_key(part),
        part.storage_offset(),
        tensor.shape,
        part.stride(),
        part.dtype,
        signs,
    )


def rename_tensors(document: object, names: dict[str, str]) -> object:
    """Return what ``codec.encode`` returned, with its tensors under other names."""
    if isinstance(document, list):
        return [rename_tensors(item, names) for item in document]
    if not isinstance(document, dict):
        return document
    if document.get("$") in ("tensor", "array"):
        return {**document, "name": names[document["name"]]}
    return {key: rename_tensors(item, names) for key, item in document.items()}


class ParameterNames:
    """Names of the parameters of several models: number of the model, dot, name in it.

    ``ties`` gives, by the model's number, the first names of weights that are tied to one of another rank's blocks.
    """

    def __init__(
        self, models: Iterable[nn.Module], ties: Mapping[int, Mapping[str, str]] | None = None
    ) -> None:
        self._names: dict[int, str] = {}
        # So that no other object gets the identity of one.
        self._kept_alive: list[nn.Parameter] = []
        for i, model in enumerate(models):
            first = (ties or {}).get(i, {})
            for name, parameter in model.named_parameters():
                self._names.setdefault(id(parameter), f"{i}.{first.get(name, name)}")
                self._kept_alive.append(parameter)

    def by_group(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Return the names of an optimizer's parameters, group by group; ``#n`` for the n-th if no model has
        it.
        """
        names: list[list[str]] = []
        number = 0
        for group in optimizer.param_groups:
            names.append([])
            for parameter in group["params"]:
                names[-1].append(self._names.get(id(parameter), f"#{number}"))
                number += 1
        return names


def encode_optimizer(
    optimizer: torch.optim.Optimizer, names: list[list[str]], tensors: dict[str, torch.Tensor], path: str
) -> object:
    """Return the optimizer's ``state_dict`` with parameters by name; of another shape than torch's as it
    is.
    """
    state = optimizer.state_dict()
    if not is_standard(state):
        return {"by_name": False, "value": encode(state, tensors, path)}
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, (name for group in names for name in group), strict=True))
    named = {
        **state,
        "state": {by_number[number]: values for number, values in state["state"].items()},
        "param_groups": [
            {**group, "params": group_names}
            for group, group_names in zip(state["param_groups"], names, strict=True)
        ],
    }
    return {"by_name": True, "value": encode(named, tensors, path)}


def is_standard(state: object) -> bool:
    """Return whether an optimizer's ``state_dict`` has torch's form."""
    return isinstance(state, Mapping) and {"state", "param_groups"} <= state.keys()
