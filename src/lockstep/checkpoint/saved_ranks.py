"""What each rank that saved had alone: whose state a rank goes on with, and their open accumulation windows, joined."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch

from lockstep.checkpoint.contents import AccumulationWindow, DataCoordinates
from lockstep.checkpoint.format.codec import Document, decode, tensor_names
from lockstep.checkpoint.reader import Checkpoint, empty_like
from lockstep.comm.dtensor import is_dtensor
from lockstep.errors import CheckpointError


class Sources:
    """The ranks that saved, seen from one that loads.

    A rank goes on with its own state if as many ranks had the same batches; else with that of the first rank that had
    its batches; where batches are dealt otherwise now, with that of the first rank.

    ``place`` is that of this rank, None where each rank has batches and gradients of its own.

    Raises:
        CheckpointError: the checkpoint tells of places that no ranks can have.
    """

    def __init__(
        self, checkpoint: Checkpoint, rank: int, world_size: int, place: DataCoordinates | None
    ) -> None:
        self._checkpoint = checkpoint
        self._saved = checkpoint.manifest.saved.world_size
        self._heads = {other: _head(checkpoint.of_rank(other)) for other in checkpoint.ranks}
        self._places = self._saved_places()
        here = place or DataCoordinates(rank, world_size, rank, world_size)
        there = self._places.get(rank if rank in self._places else checkpoint.ranks[0])
        assert there is not None
        as_many = self._saved == world_size
        same_data = there.data_size == here.data_size
        self.same_places = as_many and (rank not in self._places or there == here)
        """Whether as many ranks with the same batches and gradients saved it."""
        self.same_world = as_many and same_data
        """Whether as many ranks saved it, of which as many had batches of their own."""
        self.has_own = rank in self._places
        """Whether this rank was among those that saved."""
        self.gradient_rank = here.gradient_rank
        if self.same_world and rank in self._places:
            self.rank = rank
        elif same_data and not as_many:
            with_same = (other for other, its in self._places.items() if its.data_rank == here.data_rank)
            self.rank = next(with_same, checkpoint.ranks[0])
        else:
            self.rank = checkpoint.ranks[0]

    def documents(self) -> list[Document]:
        """Return what each rank that saved alone had, as far as it matters to the others."""
        first = self._heads[self._checkpoint.ranks[0]]
        return [self._heads.get(other, first) for other in self._ranks_to_read()]

    def gradient_ranks(self) -> list[int]:
        """Return for each rank that saved the rank whose gradients it had: ranks with other blocks or parts had the
        same."""
        return [
            self._places[other].gradient_rank if other in self._places else other
            for other in self._ranks_to_read()
        ]

    def _ranks_to_read(self) -> Iterable[int]:
        """Return the ranks that are looked at: all of this world, or of another those whose state is
        there.
        """
        return range(self._saved) if self.same_places else self._checkpoint.ranks

    def _saved_places(self) -> dict[int, DataCoordinates]:
        first, *others = self._checkpoint.ranks
        place = _read(self._heads[first], self._checkpoint.root)
        if place is None:
            return {rank: DataCoordinates(rank, self._saved, rank, self._saved) for rank in (first, *others)}
        places = {first: place}
        for rank in others:
            found = _read(self._heads[rank], self._checkpoint.root)
            if found is None or (found.data_size, found.gradient_size) != (
                place.data_size,
                place.gradient_size,
            ):
                raise CheckpointError(
                    f"{self._checkpoint.root} gives ranks {first} and {rank} different numbers of data ranks, "
                    "which is not possible in one run. Load another checkpoint."
                )
            places[rank] = found
        return places


def _head(document: Document) -> Document:
    """Return what other ranks look at: its place, and its open window."""
    return {key: value for key, value in document.items() if key == "place" or key.startswith("window.")}


def _read(document: Document, what: str) -> DataCoordinates | None:
    found = document.get("place")
    if found is None:
        return None
    names = [one.name for one in fields(DataCoordinates)]
    fits = isinstance(found, dict) and sorted(found) == sorted(names)
    if fits and all(type(number) is int and 0 <= number < 2**17 for number in found.values()):
        place = DataCoordinates(**found)
        if place.data_rank < place.data_size and place.gradient_rank < place.gradient_size:
            return place
    raise CheckpointError(
        f"{what} has {str(found)[:80]} as the place of a rank among the data ranks, which is not valid. Load another "
        "checkpoint."
    )


GRADIENTS = ("local", "reduced", "partial")
"""What a window's state has of a model by the names of parameters; see ``parallel.accumulated``."""


def plan_window(
    checkpoint: Checkpoint, item: AccumulationWindow, name: str, sources: Sources, spread: set[int]
) -> tuple[AccumulationWindow, list[Document], int] | None:
    """Return one state for each rank with gradients of its own when it was saved, and the number of this rank's.

    Where as many go on that are spread alike, each reads the tensors of its own. Of the models numbered ``spread`` this
    rank has some blocks.
    """
    documents = sources.documents()
    # It was imported from another format.
    if any(name not in document for document in documents):
        return None
    # First with tensors that have shapes alone: what fits is known before anything is read.
    shapes = {
        tensor: torch.empty(entry.shape, dtype=entry.torch_dtype, device="meta")
        for tensor, entry in checkpoint.index.items()
        if ".window." in tensor or tensor.startswith(name)
    }
    # One document may stand for several ranks.
    found = {id(document): _checked(decode(document[name], shapes), checkpoint) for document in documents}
    joined = _without_replicas([found[id(document)] for document in documents], sources.gradient_ranks())
    unchanged = sources.same_places and item.is_unchanged(joined)
    if not unchanged:
        _refuse_gradients(joined, checkpoint)
    if spread:
        _drop_others(joined, set(item.places()))
    item.check(joined)
    if unchanged:
        own = decoded(checkpoint, documents[sources.rank][name])
        joined[sources.gradient_rank] = _checked(own, checkpoint)
    return item, joined, sources.gradient_rank


def _checked(state: Document, checkpoint: Checkpoint) -> Document:
    """Return the state of a window, if it has the form that one can have; see ``preparation.window``."""
    try:
        _check_form(state)
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{checkpoint.root} has an accumulation window that is not valid ({error}). Load another checkpoint."
        ) from error
    return state


def _check_form(state: Document) -> None:
    # Checkpoints of earlier versions, or of runs without a policy, lack these.
    further: dict[str, type] = {"steps": int, "spikes": dict}
    counted = {key: kind for key, kind in further.items() if isinstance(state, dict) and key in state}
    _has(state, "the window", {"window": dict, "layouts": list, "models": list, **counted})
    if not 0 <= state.get("steps", 0) < 2**48:
        raise ValueError(f"{state['steps']} steps")
    _has(
        state["window"],
        "window",
        {
            "micro_batch": int,
            "accumulation_steps": int,
            "sync_gradients": bool,
            "is_weighted": (bool, type(None)),
            "agreed_divisor": bool,
            "window_weight": (torch.Tensor, type(None)),
            "divisor": (torch.Tensor, type(None)),
        },
    )
    _check_counts(state["window"])
    if len(state["layouts"]) != len(state["models"]) or not all(isinstance(t, str) for t in state["layouts"]):
        raise ValueError("layouts does not have one text for each model")
    for i, model in enumerate(state["models"]):
        _check_model(f"models.{i}", model)


def _check_counts(window: Document) -> None:
    # The bounds keep a file that was made by hand from giving numbers with which a loop would never end.
    if not 0 <= window["micro_batch"] < 2**48 or not 1 <= window["accumulation_steps"] < 2**48:
        raise ValueError(f"micro-batch {window['micro_batch']} of {window['accumulation_steps']}")
    if (window["window_weight"] is None) != (window["divisor"] is None):
        raise ValueError("it has only one of window_weight and divisor")
    for key in ("window_weight", "divisor"):
        number = window[key]
        if number is None:
            continue
        if number.shape or not number.is_floating_point():
            raise ValueError(f"window.{key} is a tensor of {number.dtype} and shape {tuple(number.shape)}")
        # On the meta device there is no value yet: this check runs again once tensors are read.
        if not number.is_meta and (not math.isfinite(number) or float(number) < 0):
            raise ValueError(f"window.{key} is {float(number)}")
        if key == "divisor" and not number.is_meta and float(number) <= 0:
            raise ValueError(f"window.{key} is {float(number)}")


def _check_model(what: str, model: Document) -> None:
    # Earlier versions saved ``reduced`` and ``partial``, which are refused where they are not empty.
    _has(
        model,
        what,
        {"local": dict, "reduced": dict, "partial": dict, "spent": list, "takes_buffers": bool},
    )
    if not all(isinstance(name, str) for name in model["spent"]):
        raise ValueError(f"{what}.spent holds something other than names")
    for name, gradient in model["local"].items():
        if isinstance(gradient, dict):
            _check_sparse(f"{what}.local.{name}", gradient)
        else:
            _check_gradient(f"{what}.local.{name}", gradient)


def _check_gradient(what: str, gradient: object) -> None:
    if not isinstance(gradient, torch.Tensor) or not (gradient.is_floating_point() or gradient.is_complex()):
        raise TypeError(f"{what} is not a gradient")


def _check_sparse(what: str, parts: Document) -> None:
    kinds = {"indices": torch.Tensor, "values": torch.Tensor, "size": list, "is_coalesced": bool}
    _has(parts, what, kinds)
    _check_gradient(f"{what}.values", parts["values"])
    size, indices, values = parts["size"], parts["indices"], parts["values"]
    # indices: [sparse dims, entries]; values: [entries, *dense dims].
    fits = all(type(n) is int and 0 <= n < 2**60 for n in size) and indices.dim() == 2
    fits = fits and indices.dtype == torch.int64 and indices.shape[0] <= len(size)
    fits = fits and tuple(values.shape) == (indices.shape[1], *size[indices.shape[0] :])
    if fits and not indices.is_meta and indices.numel():
        bounds = torch.tensor(size[: indices.shape[0]]).unsqueeze(1)
        fits = bool(((indices >= 0) & (indices < bounds)).all())
    if not fits:
        raise ValueError(f"{what} is not a sparse gradient")


def _has(value: object, what: str, fields: Mapping[str, type | tuple[type, ...]]) -> None:
    """Raise TypeError unless ``value`` is a dict of exactly these fields, of these types."""
    if not isinstance(value, dict) or value.keys() != fields.keys():
        raise TypeError(f"{what} does not have exactly the fields {', '.join(fields)}")
    for key, kind in fields.items():
        # True is an int, but no count.
        is_bool = isinstance(value[key], bool) and kind in (int, (int, float))
        if is_bool or not isinstance(value[key], kind):
            raise TypeError(f"{what}.{key} is {str(value[key])[:60]!r}")


def _without_replicas(states: list[Document], numbers: list[int]) -> list[Document]:
    """Return one state for each rank number: the first one's, with what was stepped on of all its replicas' blocks."""
    joined: dict[int, Document] = {}
    for number, state in zip(numbers, states, strict=True):
        if number not in joined:
            joined[number] = {**state, "models": [dict(model) for model in state["models"]]}
            continue
        # Ranks of one number share their data, and hold different blocks: what one lacks, another one has.
        for mine, other in zip(joined[number]["models"], state["models"], strict=True):
            mine["spent"] = list(dict.fromkeys([*mine["spent"], *other["spent"]]))
    return [joined[number] for number in sorted(joined)]


def _refuse_gradients(states: list[Document], checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a window is open, in which only the same ranks can go on."""
    has_gradients = any(model[kind] for state in states for model in state["models"] for kind in GRADIENTS)
    if has_gradients or any(state["window"]["divisor"] is not None for state in states):
        raise CheckpointError(
            f"{checkpoint.root} was saved inside an accumulation window: its gradients cannot be moved to other ranks. "
            "Load it with the same number of ranks and the same 'parallel', or load a checkpoint from the end of a "
            "window."
        )


def _drop_others(states: list[Document], here: set[str]) -> None:
    """Keep of what was stepped on the parameters that this rank has."""
    for state in states:
        for i, model in enumerate(state["models"]):
            model["spent"] = [name for name in model["spent"] if f"{i}.{name}" in here]


def decoded(checkpoint: Checkpoint, document: object, like: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Return a document with its tensors: laid out as the DTensors in ``like``, by name, else whole."""
    names = dict.fromkeys(tensor_names(document))
    spread = {
        name: empty_like(like[name], checkpoint.index[name])
        for name in names
        if like and name in like and name in checkpoint.index
    }
    places = checkpoint.whole(name for name in names if not is_dtensor(spread.get(name)))
    checkpoint.fill({name: place for name, place in spread.items() if is_dtensor(place)})
    return decode(document, {**spread, **places})
