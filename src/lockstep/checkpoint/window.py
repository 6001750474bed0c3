"""The accumulation window that was open when a checkpoint was saved, as the states that a run goes on with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lockstep.checkpoint.format.codec import decode, tensor_names
from lockstep.checkpoint.pieces import empty_like
from lockstep.checkpoint.read import Checkpoint
from lockstep.checkpoint.sources import Sources
from lockstep.comm.dtensor import is_dtensor
from lockstep.errors import CheckpointError

GRADIENTS = ("local", "reduced", "partial")
"""What a window's state has of a model by the names of parameters; see ``parallel.accumulated``."""


def plan_window(
    checkpoint: Checkpoint, item: Any, name: str, sources: Sources, spread: set[int]
) -> tuple[Any, list[Any], int] | None:
    """One state for each rank with gradients of its own when it was saved, and the number of this rank's.

    Where as many go on that are spread alike, each needs its own alone: the tensors of the others are not read. Of the
    models numbered ``spread`` this rank has some blocks.
    """
    documents = sources.documents()
    if any(name not in document for document in documents):  # imported from elsewhere
        return None
    shapes = {
        tensor: torch.empty(entry.shape, dtype=entry.torch_dtype, device="meta")
        for tensor, entry in checkpoint.index.items()
        if ".window." in tensor or tensor.startswith(name)
    }
    states = [decode(document[name], shapes) for document in documents]
    numbers = sources.gradient_ranks()
    unchanged = sources.same_places and item.is_unchanged(_joined(states, numbers))
    if not unchanged and (spread or any(document.get("parts") for document in documents)):
        _refuse_gradients(states, checkpoint)
    like = {f"{name}.{path}": place for path, place in item.places().items()}
    dtensors = {path: place for path, place in like.items() if is_dtensor(place)}
    for other, document in enumerate(documents):
        if not unchanged or other == sources.rank:
            states[other] = decoded(checkpoint, document[name], dtensors)
    joined = _joined(states, numbers)
    if unchanged:
        joined[sources.gradient_rank] = states[sources.rank]
    if spread or any(document.get("parts") for document in documents):
        _drop_others(joined, {path.removeprefix(f"{name}.") for path in like})
    item.check(joined)
    return item, joined, sources.gradient_rank


def _joined(states: list[dict[str, Any]], numbers: list[int]) -> list[dict[str, Any]]:
    """Of ranks with the same number the first one's state, with the gradients of all their blocks."""
    joined: dict[int, dict[str, Any]] = {}
    for number, state in zip(numbers, states, strict=True):
        if number not in joined:
            joined[number] = {**state, "models": [dict(model) for model in state["models"]]}
            continue
        for mine, other in zip(joined[number]["models"], state["models"], strict=True):
            for kind in GRADIENTS:
                mine[kind] = {**other[kind], **mine[kind]}
            mine["spent"] = list(dict.fromkeys([*mine["spent"], *other["spent"]]))
    return [joined[number] for number in sorted(joined)]


def _refuse_gradients(states: list[dict[str, Any]], checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if there are gradients in a window that only the same ranks can go on in."""
    if any(model[kind] for state in states for model in state["models"] for kind in GRADIENTS):
        raise CheckpointError(
            f"{checkpoint.root} was saved inside an accumulation window: its gradients cannot be moved to or from "
            "ranks with other parts of the model. Load it with as many ranks and the same 'parallel', or load a "
            "checkpoint from the end of a window."
        )


def _drop_others(states: list[dict[str, Any]], here: set[str]) -> None:
    """Keep of each state what belongs to parameters that this rank has."""
    for state in states:
        for i, model in enumerate(state["models"]):
            names = {path.removeprefix(f"models.{i}.reduced.") for path in here}
            for kind in ("local", "reduced"):
                model[kind] = {name: value for name, value in model[kind].items() if name in names}
            model["spent"] = [name for name in model["spent"] if name in names]
            model["partial"] = {first: group for first, group in model["partial"].items() if first in names}


def decoded(checkpoint: Checkpoint, document: Any, like: Mapping[str, torch.Tensor] | None = None) -> Any:
    """A document with its tensors: laid out as the DTensors in ``like``, by name, else whole."""
    names = dict.fromkeys(tensor_names(document))
    spread = {
        name: empty_like(like[name], checkpoint.index[name])
        for name in names
        if like and name in like and name in checkpoint.index
    }
    places = checkpoint.whole(name for name in names if not is_dtensor(spread.get(name)))
    checkpoint.fill({name: place for name, place in spread.items() if is_dtensor(place)})
    return decode(document, {**spread, **places})
