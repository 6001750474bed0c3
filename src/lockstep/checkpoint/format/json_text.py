"""JSON that has one text for each document, and documents that are checked when they are read."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lockstep.errors import CheckpointError, UsageError

LARGEST_JSON_BYTES = 256 << 20
MOST_JSON_VALUES = 10_000_000
"""Of each document: so many are read in seconds, and take less than 1 GiB of memory."""
DEEPEST_JSON = 100
"""Containers in containers; so much fits on the stack of what decodes them."""

Extent = Annotated[int, Field(ge=0, lt=2**60)]
Strict = ConfigDict(extra="forbid", frozen=True, strict=True)


def canonical(document: Any) -> bytes:
    """One JSON text for each document, in ASCII, with keys in their order.

    Raises:
        UsageError: ``parse_json`` would refuse it, as too deep or too long.
    """
    if _is_deep(document):
        raise UsageError(
            f"A state holds containers nested more than {DEEPEST_JSON} deep, which a checkpoint cannot hold. Let "
            "state_dict() return a flatter one."
        )
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    if _values(text) > MOST_JSON_VALUES:
        raise UsageError(
            f"What a state holds beside its tensors is {_values(text)} values, but a checkpoint holds at most "
            f"{MOST_JSON_VALUES}. Let state_dict() return tensors in place of long lists."
        )
    if len(text) >= LARGEST_JSON_BYTES:
        raise UsageError(
            f"What a state holds beside its tensors is {len(text)} bytes of JSON, but a checkpoint holds fewer than "
            f"{LARGEST_JSON_BYTES}. Let state_dict() return tensors in place of long lists."
        )
    return text.encode("ascii") + b"\n"


def _values(text: str | bytes) -> int:
    """At least the number of values in a text of JSON, counted without reading it."""
    if isinstance(text, bytes):
        return text.count(b",") + text.count(b"[") + text.count(b"{")
    return text.count(",") + text.count("[") + text.count("{")


def _is_deep(document: Any) -> bool:
    level = [document]
    for _ in range(DEEPEST_JSON + 1):
        level = [item for item in level if isinstance(item, (dict, list, tuple))]
        if not level:
            return False
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return True


def parse_json(content: bytes, path: str) -> Any:
    """A JSON document without duplicate keys and without numbers that JSON lacks, and not too deep.

    Raises:
        CheckpointError: it is none.
    """
    if len(content) > LARGEST_JSON_BYTES or _values(content) > MOST_JSON_VALUES:
        raise CheckpointError(
            f"{path} has {len(content)} bytes and {_values(content)} values, but at most {LARGEST_JSON_BYTES} and "
            f"{MOST_JSON_VALUES} are read. Load another checkpoint."
        )
    try:
        document = json.loads(
            content.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite
        )
        if _is_deep(document):
            raise ValueError(f"it is nested more than {DEEPEST_JSON} deep")
        return document
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no readable JSON: {error}. Load another checkpoint.") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("a key is there twice")
    return document


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if number - number == 0 else _refuse_constant(text)


Checked = TypeVar("Checked", bound=BaseModel)


def checked(model: type[Checked], document: Any, path: str) -> Checked:
    """``document`` as ``model``. Raises CheckpointError naming the first place that does not fit."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path}: {place}: {first['msg']}. Load another checkpoint.") from error
