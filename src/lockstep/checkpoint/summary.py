"""What a checkpoint holds, for people: from its manifest and its index, without reading a tensor."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from lockstep.checkpoint.folders import is_rest, numbers
from lockstep.checkpoint.format.documents import (
    LARGEST_JSON_BYTES,
    STATE,
    TENSORS,
    Document,
    Manifest,
    digest_of,
    parse_json,
)
from lockstep.checkpoint.format.index import Index, index_from_bytes
from lockstep.checkpoint.store.base import Store
from lockstep.checkpoint.store.verify import is_published, read_manifest, root_of
from lockstep.errors import CheckpointError, NoCheckpointError


@dataclass
class SummaryGroup:
    """Tensors of one object of the run: how many there are, their elements, and bytes by dtype."""

    name: str
    tensors: int = 0
    elements: int = 0
    bytes_by_dtype: dict[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_by_dtype.values())


@dataclass(frozen=True)
class Summary:
    """A checkpoint; ``contents`` counts the objects of each kind."""

    directory: str
    manifest: Manifest
    index: Index
    contents: dict[str, int]

    @property
    def groups(self) -> list[SummaryGroup]:
        """The tensors by what they belong to, in the order of the run's objects."""
        groups: dict[str, SummaryGroup] = {}
        for name, entry in sorted(self.index.items(), key=lambda item: _natural(item[0])):
            group = groups.setdefault(_owner(name), SummaryGroup(_owner(name)))
            group.tensors += 1
            group.elements += math.prod(entry.shape)
            group.bytes_by_dtype[entry.dtype] = group.bytes_by_dtype.get(entry.dtype, 0) + entry.nbytes
        return list(groups.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(entry.size for entry in self.manifest.files.values())

    def facts(self, with_tensors: bool) -> Document:
        """Return the summary as plain values."""
        files = {name: entry.model_dump() for name, entry in sorted(self.manifest.files.items())}
        groups = {
            group.name: {
                "tensors": group.tensors,
                "elements": group.elements,
                "bytes": group.nbytes,
                "bytes_by_dtype": group.bytes_by_dtype,
            }
            for group in self.groups
        }
        saved = self.manifest.saved.model_dump()
        facts = {"directory": self.directory, "saved": saved, "contents": self.contents, "bytes": self.nbytes}
        facts |= {"groups": groups, "files": files}
        if with_tensors:
            facts["tensors"] = {name: entry.model_dump() for name, entry in sorted(self.index.items())}
        return facts


def summarize(store: Store, directory: str) -> Summary:
    """Return what is in a checkpoint. Its manifest and index are verified, its tensors are not read.

    Raises:
        NoCheckpointError: there is none.
        CheckpointError: one of its documents is damaged.
    """
    manifest = read_manifest(store, directory)
    root = root_of(directory, manifest)
    index = index_from_bytes(_document(store, root, manifest, TENSORS), manifest, f"{root}/{TENSORS}")
    state = parse_json(_document(store, root, manifest, STATE), f"{root}/{STATE}")
    contents = state.get("contents") if isinstance(state, dict) else None
    return Summary(directory, manifest, index, dict(contents) if isinstance(contents, dict) else {})


def _document(store: Store, root: str, manifest: Manifest, name: str) -> bytes:
    path = f"{root}/{name}"
    try:
        content = store.read(path, LARGEST_JSON_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Load another checkpoint.") from error
    if name not in manifest.files or digest_of(content) != manifest.files[name].blake3:
        raise CheckpointError(
            f"{path} is damaged: its BLAKE3 digest is not the manifest's. Load another checkpoint."
        )
    return content


def checkpoints_in(store: Store, directory: str) -> list[str]:
    """Return the checkpoints that ``directory`` stands for, in the order in which loading tries them.

    It is a checkpoint itself (with the one that it replaced, where that is still there), or a folder of numbered ones,
    or a project with such a folder.

    Raises:
        NoCheckpointError: it is none of these.
    """
    candidates = store.candidates(directory)
    if any(is_published(store, candidate) for candidate in candidates):
        return candidates
    for folder in (directory, f"{directory}/checkpoints"):
        found = numbers(folder, store)
        if found:
            places = [f"{folder}/checkpoint_{number}" for number in reversed(found)]
            # Of some that were removed, files are left that others had added.
            return [place for place in places if not is_rest(store, place)] or places
    raise NoCheckpointError(
        f"There is no checkpoint at {directory}, and none in it. Name a directory that save_state wrote, or the folder "
        "of a project's checkpoints."
    )


def _owner(name: str) -> str:
    """Return the object that a tensor belongs to: ``model.0``, ``optimizer.1``; all that ranks alone have is
    ``rank``.
    """
    kind, _, rest = name.partition(".")
    return kind if kind == "rank" else f"{kind}.{rest.partition('.')[0]}"


def _natural(name: str) -> list[object]:
    order = ("model", "optimizer", "scheduler", "scaler", "object")
    kind = name.partition(".")[0]
    place = order.index(kind) if kind in order else len(order)
    parts = re.split(r"(\d+)", name)
    return [place, *(int(part) if i % 2 else part for i, part in enumerate(parts))]
