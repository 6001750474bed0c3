"""The format of a checkpoint, version 1: what its JSON files say, checked on reading. See docs/checkpoints.md.

manifest.json              size and BLAKE3 digest of every other file; its own digest; who saved it, and how
tensors.json               dtype, shape and pieces of every tensor
state.json                 what is common to all ranks and no tensor
rank-00000.json, ...       what each rank alone has: generators, place in the data, registered objects
model-00000.safetensors, model_1-00000.safetensors, state-00000.safetensors, ...
                           the pieces of tensors that rank 0, 1, ... wrote
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lockstep.checkpoint.format.digest import FileRecord, digest_of
from lockstep.checkpoint.format.json_text import Extent, Strict, canonical, checked, parse_json
from lockstep.checkpoint.format.names import MANIFEST, check_name
from lockstep.errors import CheckpointError

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
    settings: dict[str, Any]
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
        """The manifest as a file that names its own digest."""
        body = self.model_dump()
        return canonical({"blake3": digest_of(canonical(body)), "manifest": body})

    @staticmethod
    def from_bytes(content: bytes, path: str) -> Manifest:
        """The inverse of ``to_bytes``.

        Raises:
            CheckpointError: a bit differs from what was written, or it is of another version.
        """
        document = parse_json(content, path)
        body = document.get("manifest") if isinstance(document, dict) else None
        if not isinstance(body, dict) or document != {"blake3": digest_of(canonical(body)), "manifest": body}:
            raise CheckpointError(
                f"{path} is damaged: its BLAKE3 digest is another. Load another checkpoint."
            )
        if canonical({"blake3": document["blake3"], "manifest": body}) != content:
            raise CheckpointError(f"{path} is damaged: it was written otherwise. Load another checkpoint.")
        if type(body.get("version")) is not int or body["version"] != VERSION:
            raise CheckpointError(
                f"{path} is of format version {body.get('version')}, but this is version {VERSION}. "
                "Load it with the version of Lockstep that wrote it."
            )
        manifest = checked(Manifest, body, path)
        for name in manifest.files:
            if check_name(name) == MANIFEST:
                raise CheckpointError(f"{path} lists itself. Load another checkpoint.")
        return manifest


class ModelState(BaseModel):
    """What state.json has of a model: names of tied weights by the first name of each, and what is no tensor."""

    model_config = Strict

    ties: dict[str, str]
    extra: dict[str, Any]


class CommonState(BaseModel):
    """state.json. Further keys are the names of objects, their values what ``codec.encode`` returned."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    contents: dict[str, int]
    models: dict[str, ModelState]


def entry_of(record: FileRecord) -> FileEntry:
    return FileEntry(size=record.size, blake3=record.blake3)


def rank_file(rank: int) -> str:
    """Name of the JSON file of what one rank alone has."""
    return f"rank-{rank:05d}.json"
