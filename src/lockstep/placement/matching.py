"""Which tensor of a checkpoint is which of a model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from lockstep.config.values import listed, shown
from lockstep.errors import CheckpointError
from lockstep.placement.sizes import is_converted
from lockstep.placement.stored import Stored
from lockstep.placement.ties import Place
from lockstep.torch_internals import modules as torch_modules

logger = logging.getLogger(__name__)

_EXTRA_STATE = torch_modules.EXTRA_STATE


def match(
    model: nn.Module, places: list[Place], stored: Mapping[str, Stored], strict: bool, origin: str
) -> dict[str, Stored]:
    """Name of a place -> its tensor in the checkpoint. A tied parameter takes that of its first name that is there.

    Keys of a transformers model without its head fit one with it, and the other way round.

    Raises:
        CheckpointError: a shape differs; a tensor without values is not in the checkpoint; with ``strict`` any
            persistent tensor that is not there, or any key that the model does not have.
    """
    known = {name for place in places if place.is_persistent for name in place.names}
    prefix = getattr(model, "base_model_prefix", "")
    by_name: dict[str, Stored] = {}
    unexpected = []
    for key, tensor in stored.items():
        name = _name_in_model(key, known, prefix if isinstance(prefix, str) else "")
        if name is None:
            unexpected += [key] if not key.endswith(_EXTRA_STATE) else []
        elif name not in by_name or name == key:
            by_name[name] = tensor
    found = {
        place.name: by_name[name]
        for place in places
        for name in place.names[::-1]  # the first name is the last to be entered
        if name in by_name
    }
    missing = [place for place in places if place.is_persistent and place.name not in found]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{origin} and {type(model).__name__} do not have the same weights: missing "
            f"{_some(place.name for place in missing)}; unexpected {_some(unexpected)}. "
            "Pass strict=False to load what fits."
        )
    empty = [place.name for place in places if place.name not in found and place.tensor.is_meta]
    if empty:
        raise CheckpointError(
            f"{origin} does not have {_some(empty)}, which have no values in the model either. Load another "
            "checkpoint, tie weights before (model.tie_weights()), or build the model with values for buffers "
            "(include_buffers=False)."
        )
    _check_shapes(model, places, found, origin)
    if unexpected:
        logger.warning(
            "%s has weights that %s does not use: %s.", origin, type(model).__name__, _some(unexpected, 20)
        )
    if missing:
        names = _some((place.name for place in missing), 20)
        logger.warning("%s does not have %s: they keep the values they have.", origin, names)
    return found


def loaded_dtype(
    place: Place, stored: Stored, dtype: torch.dtype | None, in_fp32: Iterable[str]
) -> torch.dtype:
    """What a tensor becomes: ``dtype`` if it is of floating point, else what the model has.

    ``in_fp32``: parts of names that are float32 where float16 is asked for.
    """
    if dtype is None or not is_converted(place.tensor.dtype) or not is_converted(stored.dtype):
        return place.tensor.dtype
    if dtype == torch.float16 and any(key == place.name or f"{key}." in place.name for key in in_fp32):
        return torch.float32
    return dtype


def _name_in_model(key: str, known: set[str], prefix: str) -> str | None:
    if key in known:
        return key
    if not prefix:
        return None
    candidates = (f"{prefix}.{key}", key.removeprefix(f"{prefix}."))
    return next((name for name in candidates if name in known), None)


def _check_shapes(model: nn.Module, places: list[Place], found: Mapping[str, Stored], origin: str) -> None:
    wrong = [
        f"{place.name} is {tuple(found[place.name].shape)} there and {tuple(place.tensor.shape)} in the model"
        for place in places
        if place.name in found and found[place.name].shape != place.tensor.shape
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{origin} does not fit {type(model).__name__}: {'; '.join(wrong[:3])}{more}. Build the model from the "
            "configuration that the checkpoint was made with."
        )


def _some(names: Iterable[str], limit: int = 5) -> str:
    return listed((shown(name, 80) for name in names), limit)
