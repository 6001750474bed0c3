"""The format of a checkpoint, version 1: what its JSON files say, checked on reading. See docs/checkpoints.md.

manifest.json              size and BLAKE3 digest of every other file; its own digest; who saved it, and how
tensors.json               dtype, shape and pieces of every tensor
state.json                 what is common to all ranks and no tensor
rank-00000.json, ...       what each rank alone has: generators, place in the data, registered objects
model-00000.safetensors, model_1-00000.safetensors, state-00000.safetensors, ...
                           the pieces of tensors that rank 0, 1, ... wrote

BLAKE3 is a cryptographic hash like SHA-256, and several times as fast on one core: faster than most disks.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NoReturn, TypeAlias, TypeVar

import numpy
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from lockstep import __version__
from lockstep.errors import CheckpointError, UsageError

Document: TypeAlias = dict[str, Any]
"""An object of JSON, as ``encode`` gives it: what is in it is checked where it is read."""

Chunk = bytes | bytearray | memoryview


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes, and BLAKE3 digest of 256 bits in hexadecimal, as ``b3sum`` prints it."""

    size: int
    blake3: str


class Digest:
    """The record of a file whose content is given piece by piece."""

    def __init__(self) -> None:
        self._hash = blake3()
        self._size = 0

    def update(self, chunk: Chunk) -> None:
        self._hash.update(chunk)
        self._size += len(chunk)

    def record(self) -> FileRecord:
        return FileRecord(self._size, self._hash.hexdigest())


def record_of(chunks: Iterable[Chunk]) -> FileRecord:
    """Return the record of a file with this content."""
    digest = Digest()
    for chunk in chunks:
        digest.update(chunk)
    return digest.record()


def digest_of(content: Chunk) -> str:
    """Compute BLAKE3 of some bytes, in hexadecimal."""
    return record_of([content]).blake3


LARGEST_JSON_BYTES = 256 << 20
MOST_JSON_VALUES = 10_000_000
"""Of each document: so many are read in seconds, and take less than 1 GiB of memory."""
DEEPEST_JSON = 100
"""Containers in containers; so much fits on the stack of what decodes them."""

Extent = Annotated[int, Field(strict=True, ge=0, lt=2**60)]
Strict = ConfigDict(extra="forbid", frozen=True, strict=True)


def canonical(document: object) -> bytes:
    """Write each document as one JSON text, in ASCII, with keys in their order.

    Raises:
        UsageError: ``parse_json`` would refuse it, as too deep or too long.
    """
    if _is_deep(document):
        raise UsageError(
            f"A state holds containers nested more than {DEEPEST_JSON} deep, which a checkpoint cannot hold. Let "
            "state_dict() return a flatter state."
        )
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    if _least_values(text) > MOST_JSON_VALUES:
        raise UsageError(
            f"A state has {_least_values(text)} values beside its tensors, but a checkpoint holds at most "
            f"{MOST_JSON_VALUES} of them. Let state_dict() return tensors in place of long lists."
        )
    if len(text) >= LARGEST_JSON_BYTES:
        raise UsageError(
            f"A state has {len(text)} bytes of JSON beside its tensors, but a checkpoint holds fewer than "
            f"{LARGEST_JSON_BYTES} of them. Let state_dict() return tensors in place of long lists."
        )
    return text.encode("ascii") + b"\n"


def _least_values(text: str | bytes) -> int:
    """Return a lower bound for the number of values in a text of JSON, counted without reading it."""
    if isinstance(text, bytes):
        return text.count(b",") + text.count(b"[") + text.count(b"{")
    return text.count(",") + text.count("[") + text.count("{")


def _is_deep(document: Any) -> bool:
    # Level by level and not recursively: what is too deep must not overflow the stack.
    level = [document]
    for _ in range(DEEPEST_JSON + 1):
        level = [item for item in level if isinstance(item, (dict, list, tuple))]
        if not level:
            return False
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return True


def parse_json(content: bytes, path: str) -> object:
    """Return a JSON document without duplicate keys and without numbers that JSON lacks, and not too deep.

    Raises:
        CheckpointError: it is none.
    """
    # Counted in the text: what is parsed takes many times its bytes.
    if len(content) > LARGEST_JSON_BYTES or _least_values(content) > MOST_JSON_VALUES:
        raise CheckpointError(
            f"{path} has {len(content)} bytes and {_least_values(content)} values, but at most {LARGEST_JSON_BYTES} "
            f"and {MOST_JSON_VALUES} are read. Load another checkpoint."
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


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("it has the same key twice")
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    # 1e999 is JSON, and infinity for Python.
    number = float(text)
    return number if number - number == 0 else _refuse_constant(text)


Form = TypeVar("Form")


def validated(form: type[Form], document: object, path: str) -> Form:
    """Validate ``document`` as ``form``, a model, dataclass or type. Raises ValueError: names the first place that
    differs."""
    try:
        return TypeAdapter(form).validate_python(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path}: {place}: {first['msg']}") from error


def checked(form: type[Form], document: object, path: str) -> Form:
    """Return what ``validated`` returns. Raises CheckpointError."""
    try:
        return validated(form, document, path)
    except ValueError as error:
        raise CheckpointError(f"{error}. Load another checkpoint.") from error


MANIFEST = "manifest.json"
OURS = re.compile(r"(tensors|state|rank-\d{5,6})\.json|(model(_\d+)?|state)-\d{5,6}(-\d{3,})?\.safetensors")
"""Names that ``save_state`` gives to files."""


def check_name(name: str) -> str:
    """Return ``name`` if it is a relative path of plain names, as files of a checkpoint have.

    Raises:
        CheckpointError: it is absolute, leaves its folder, or has other characters.
    """
    parts = name.split("/")
    # strip refuses "." and "..", which lead out of the folder.
    plain = all(re.fullmatch(r"[A-Za-z0-9_ .,=+@-]{1,255}", part) and part.strip(".") for part in parts)
    if not plain or str(PurePosixPath(name)) != name or len(name) > 1024:
        raise CheckpointError(
            f"A file of the checkpoint is named {name[:80]!r}, which is not a plain relative name. Load another "
            "checkpoint: nothing outside its folder is read."
        )
    return name


VERSION = 1
TENSORS, STATE = "tensors.json", "state.json"


class FileEntry(BaseModel):
    """Size in bytes and BLAKE3 digest of a file."""

    model_config = Strict

    size: Extent
    blake3: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Saved(BaseModel):
    """Who saved a checkpoint, and how."""

    model_config = Strict

    time: str
    world_size: Annotated[int, Field(ge=1, le=2**17)]
    ranks: Annotated[list[Extent], Field(min_length=1)]
    parallel: str
    settings: Document
    versions: dict[str, str]


class Manifest(BaseModel):
    """What belongs to a checkpoint. ``folder`` holds the files, where they don't lie beside the manifest."""

    model_config = Strict

    format: Literal["lockstep-checkpoint"] = "lockstep-checkpoint"
    version: Literal[1] = 1
    folder: Annotated[str, Field(pattern=r"^[a-z0-9-]{0,64}$")] = ""
    saved: Saved
    files: dict[str, FileEntry]

    def to_bytes(self) -> bytes:
        """Return the manifest as a file that names its own digest."""
        body = self.model_dump()
        return canonical({"blake3": digest_of(canonical(body)), "manifest": body})

    @staticmethod
    def from_bytes(content: bytes, path: str) -> Manifest:
        """Return the inverse of ``to_bytes``.

        Raises:
            CheckpointError: a bit differs from what was written, or it is of another version.
        """
        document = parse_json(content, path)
        body = document.get("manifest") if isinstance(document, dict) else None
        if not isinstance(body, dict) or document != {"blake3": digest_of(canonical(body)), "manifest": body}:
            raise CheckpointError(
                f"{path} is damaged: its BLAKE3 digest is not the one that was saved. Load another checkpoint."
            )
        # The digest is that of the parsed values; this finds a change of the text alone.
        if canonical({"blake3": document["blake3"], "manifest": body}) != content:
            raise CheckpointError(
                f"{path} is damaged: it is not in the form in which it was written. Load another checkpoint."
            )
        # Before the fields are looked at, as another version may have others.
        if type(body.get("version")) is not int or body["version"] != VERSION:
            raise CheckpointError(
                f"{path} is of format version {body.get('version')}, but this is version {VERSION}. "
                "Load it with the version of Lockstep that wrote it."
            )
        manifest = checked(Manifest, body, path)
        for name in manifest.files:
            if check_name(name) == MANIFEST:
                raise CheckpointError(
                    f"{path} is damaged: it lists itself among its files. Load another checkpoint."
                )
        return manifest


class ModelState(BaseModel):
    """What state.json has of a model: names of tied weights by the first name of each, and what is no tensor."""

    model_config = Strict

    ties: dict[str, str]
    extra: Document


class CommonState(BaseModel):
    """state.json. Further keys are the names of objects, their values what ``codec.encode`` returned."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    contents: dict[str, int]
    models: dict[str, ModelState]


def entry_of(record: FileRecord) -> FileEntry:
    return FileEntry(size=record.size, blake3=record.blake3)


def rank_file(rank: int) -> str:
    """Return name of the JSON file of what one rank alone has."""
    return f"rank-{rank:05d}.json"


@cache
def versions() -> dict[str, str]:
    """Return the versions of Lockstep, torch, NumPy and Python."""
    import torch

    return {
        "lockstep": __version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }
