"""What of a training run is in a checkpoint: from the prepared objects to tensors and documents, and back.

model.<i>.<name>                         weights and buffers
optimizer.<i>.state.<parameter>.<key>    state of optimizers, by the names of parameters
object.<i>.<path>                        tensors of registered objects, where ranks hold the same
rank.<r>.<path>                          tensors that one rank alone has

Where ranks have different blocks of a model, each collects its own, and ``union`` joins the documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.format.codec import encode, tensor_names
from lockstep.checkpoint.format.digest import Digest
from lockstep.checkpoint.format.tensorfile import dtype_name
from lockstep.checkpoint.parameters import ParameterNames, encode_optimizer
from lockstep.checkpoint.training import CheckpointContents
from lockstep.comm.collectives import as_bytes
from lockstep.comm.dtensor import boxes_of, is_dtensor, local
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
    ``split_divergent_state`` divides them. ``state`` and ``own`` are the documents of all ranks and of this one.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    of_first: dict[str, torch.Tensor] = field(default_factory=dict)
    of_rank: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    ties: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Of models whose ranks have different blocks."""

    def replace_model(self, number: int, weights: dict[str, Any] | None) -> None:
        """Save these whole weights of a model, or none of it, in place of what was collected."""
        prefixes = (f"model.{number}.", f"extra.{number}.")
        for tensors in (self.tensors, self.of_first):
            for name in [name for name in tensors if name.startswith(prefixes)]:
                del tensors[name]
        if weights is None:
            del self.state["models"][str(number)]
        else:
            self.state["models"][str(number)] = collect_weights(weights, set(), number, self)


def collect(training: CheckpointContents, rank: int) -> RankState:
    """The state of the run on this rank; tensors are not copied.

    Raises:
        UsageError: a state holds what no checkpoint can.
    """
    found = RankState(ties={number: whole.ties for number, whole in training.whole.items()})
    found.state = {"contents": training.contents(), "models": {}}
    for i, model in enumerate(training.models):
        found.state["models"][str(i)] = _collect_model(model, i, found)
    names = ParameterNames(training.models, found.ties)
    for name, optimizer in training.stateful("optimizer"):
        found.state[name] = encode_optimizer(optimizer, names.of(optimizer), found.tensors, name)
        if training.whole and not found.state[name]["by_name"]:
            raise UsageError(
                f"{name} is a {type(optimizer).__name__}, whose state does not tell the parameters apart, so that the "
                "states of a pipeline's ranks cannot be joined. Use an optimizer with torch's form of state_dict()."
            )
    for name, item in training.stateful(*COMMON):
        found.state[name] = encode(item.state_dict(), found.tensors, name)
    found.own = {"rng": encode(rng_state(), found.of_rank, f"rank.{rank}.rng")}
    if training.place is not None:
        found.own["place"] = asdict(training.place)
    if training.whole:  # as are the gradients of some blocks
        found.own["parts"] = True
    for name, item in training.stateful(*OF_RANK):
        found.own[name] = _collect_of_rank(item, name, rank, found)
    for name, tensor in (*found.tensors.items(), *found.of_first.items(), *found.shared.items()):
        dtype_name(local(tensor), name)
        boxes_of(tensor)  # raises where they cannot be told
        if tensor.is_meta:
            raise UsageError(
                f"{name} is on the meta device and has no elements. Give it some before it is saved."
            )
    return found


def _collect_of_rank(item: Any, name: str, rank: int, found: RankState) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    document = encode(item.state_dict(), tensors, name)
    is_window = name.startswith("window.")
    reduced = {f"{name}.{path}" for path in item.places()} if is_window else set()
    names = {}
    for path, tensor in tensors.items():
        names[path] = path
        if is_dtensor(tensor) and (path in reduced or not is_window):
            found.tensors[path] = tensor
        elif name.startswith("object."):
            found.shared[path] = tensor
        else:
            names[path] = f"rank.{rank}.{path}"
            found.of_rank[names[path]] = local(tensor)
            # Of a gradient that is not averaged yet; other ranks' parts may be of others.
            if is_dtensor(tensor):
                found.own.setdefault("parts", []).append(names[path])
    return rename_tensors(document, names)


def _collect_model(model: nn.Module, number: int, found: RankState) -> dict[str, Any]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return collect_weights(model.state_dict(), parameters, number, found)


def collect_weights(
    weights: dict[str, Any], parameters: set[str], number: int, found: RankState
) -> dict[str, Any]:
    """Names of tied weights by the first name of each, and what is no tensor, as JSON."""
    first_names: dict[Any, str] = {}
    ties = found.ties.get(number, {})
    document: dict[str, Any] = {"ties": {}, "extra": {}}
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor) or is_extra(name):
            document["extra"][name] = encode(value, found.of_first, f"extra.{number}.{name}")
            continue
        here = first_names.setdefault(place_of(value), name) if value.numel() else name
        first = ties.get(here, here)  # may be another rank's
        if first != name:
            document["ties"][name] = first
        if here != name:
            continue
        if name in parameters or is_dtensor(value):
            found.tensors[f"model.{number}.{first}"] = value
        else:
            found.of_first[f"model.{number}.{first}"] = value
    return document


def is_extra(name: str) -> bool:
    """Whether an entry of a module's ``state_dict`` is what its ``get_extra_state`` returned."""
    return name.split(".")[-1] == torch_modules.EXTRA_STATE


def place_of(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same elements of memory."""
    part = local(tensor)
    return torch_tensors.storage_key(part), part.storage_offset(), tensor.shape, part.stride(), part.dtype


def digests_of(found: RankState) -> dict[str, str]:
    """Digests of what ranks may hold the same or not: buffers, and tensors of registered objects."""
    return {name: _digest_of(tensor) for name, tensor in (found.of_first | found.shared).items()}


def split_divergent_state(
    found: RankState, digests: list[dict[str, str]], rank: int, ranks: list[int]
) -> None:
    """Give this rank tensors of its own where they differ from those of the first of ``ranks``.

    Buffers that it does not have, as its blocks are others, are compared with those of the first rank that has them.
    """
    differ = set()
    for name, digest in digests[rank].items():
        holders = [other for other in ranks if name in digests[other]] if name in found.of_first else ranks
        if digests[holders[0]].get(name) != digest:
            differ.add(name)
    buffers = {name: tensor for name, tensor in found.of_first.items() if name in differ}
    if buffers:
        found.own["buffers"] = encode(buffers, found.of_rank, f"rank.{rank}.buffers")
    names = {name: f"rank.{rank}.{name}" if name in differ else name for name in found.shared}
    for name, tensor in found.shared.items():
        (found.of_rank if name in differ else found.tensors)[names[name]] = tensor
    for name in [name for name in found.own if name.startswith("object.")]:
        everything = {other: names.get(other, other) for other in tensor_names(found.own[name])}
        found.own[name] = rename_tensors(found.own[name], everything)


def _digest_of(tensor: torch.Tensor) -> str:
    digest = Digest()
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(memoryview(as_bytes(tensor.detach().cpu()).numpy()))  # type: ignore[arg-type]
    return digest.record().blake3


def rename_tensors(document: Any, names: dict[str, str]) -> Any:
    """What ``codec.encode`` returned, with its tensors under other names."""
    if isinstance(document, list):
        return [rename_tensors(item, names) for item in document]
    if not isinstance(document, dict):
        return document
    if document.get("$") in ("tensor", "array"):
        return {**document, "name": names[document["name"]]}
    return {key: rename_tensors(item, names) for key, item in document.items()}
