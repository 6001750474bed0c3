"""One pickled file, or weights that are split over numbered ones with an index."""

from __future__ import annotations

import json
import re
from typing import Any

import torch

from lockstep.checkpoint.foreign.reader import Reader
from lockstep.checkpoint.foreign.roles import is_weights, sort_entries
from lockstep.checkpoint.foreign.state import ImportedState
from lockstep.checkpoint.weights.names import PICKLED_INDEX

SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_single(reader: Reader, name: str) -> ImportedState:
    """The weights, and whatever else a training script put beside them."""
    state = ImportedState("one pickled file")
    sort_entries(reader.read(name), name, state)
    return state


def read_sharded(reader: Reader) -> ImportedState:
    """The weights of ``pytorch_model-0000x-of-0000N.bin`` by ``pytorch_model.bin.index.json``.

    Raises:
        CheckpointError: the index names another file than such a one, or the files hold other tensors than it says.
    """
    places = _weight_map(reader)
    files = sorted(set(places.values()))
    model: dict[str, torch.Tensor] = {}
    for file, value in zip(files, reader.read_all(files), strict=True):
        expected = {name for name, place in places.items() if place == file}
        if not is_weights(value) or value.keys() != expected:
            held = len(value) if isinstance(value, dict) else 0
            raise reader.broken(
                file, f"{PICKLED_INDEX} puts {len(expected)} tensors into it, but it has {held} others"
            )
        model.update(value)
    ordered = {name: model[name] for name in places}
    return ImportedState("weights in numbered files", [ordered], notes=[f"{file}: weights" for file in files])


def _weight_map(reader: Reader) -> dict[str, str]:
    try:
        places: Any = json.loads(reader.source.text(PICKLED_INDEX))["weight_map"]
        well_formed = all(re.fullmatch(r"[\w.\-]+\.bin", place) for place in places.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        well_formed = False
    if not well_formed:
        raise reader.broken(PICKLED_INDEX, "it has no 'weight_map' from tensors to plain names of .bin files")
    return dict(places)
