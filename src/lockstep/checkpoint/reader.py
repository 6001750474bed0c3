"""Read a verified checkpoint: its documents, and of its tensors what lies in the regions that a rank holds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from lockstep.checkpoint.format.codec import Document
from lockstep.checkpoint.format.documents import (
    LARGEST_JSON_BYTES,
    MANIFEST,
    STATE,
    TENSORS,
    CommonState,
    Manifest,
    checked,
    parse_json,
    rank_file,
)
from lockstep.checkpoint.format.index import ChunkMetadata, Index, TensorEntry, index_from_bytes
from lockstep.checkpoint.format.tensors import TensorReader
from lockstep.checkpoint.store.local import LocalStore
from lockstep.checkpoint.store.verify import in_parallel, read_manifest, root_of
from lockstep.comm.dtensor import is_dtensor, local, regions_of
from lockstep.comm.layout import ShardRegion
from lockstep.errors import CheckpointError


@dataclass(frozen=True)
class ReadItem:
    """Copy ``lengths`` elements from ``offsets`` on of ``key`` in ``file`` into ``into``, a view of this shape."""

    file: str
    key: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    into: torch.Tensor
    name: str


def create_read_items(places: Mapping[str, torch.Tensor], index: Index) -> list[ReadItem]:
    """List what must be read to fill ``places``, whole tensors or DTensors of which each rank holds its
    part.

    Raises:
        CheckpointError: a tensor is not in the checkpoint or has another shape.
    """
    return create_read_items_as({name: (name, place) for name, place in places.items()}, index)


def create_read_items_as(places: Mapping[str, tuple[str, torch.Tensor]], index: Index) -> list[ReadItem]:
    """Return the same, of places that are known by other names than the tensors, which stand first in the
    pairs.
    """
    found: list[ReadItem] = []
    for name, (saved, tensor) in places.items():
        if saved not in index:
            raise CheckpointError(
                f"The checkpoint has no tensor {saved}. Load it into what it was saved from."
            )
        if tuple(tensor.shape) != index[saved].shape:
            raise CheckpointError(
                f"{name} is {index[saved].shape} in the checkpoint, but {tuple(tensor.shape)} here. Load it into what "
                "it was saved from."
            )
        if not tensor.numel():
            continue
        chunks, part = _SortedChunks(index[saved]), local(tensor)
        for region in regions_of(tensor):
            for chunk in chunks.near(region):
                one = _read_of(chunk, region, part, saved)
                if one is not None:
                    found.append(one)
    return found


class _SortedChunks:
    """The chunks of a tensor, sorted along the dimension in which it was cut most often."""

    def __init__(self, entry: TensorEntry) -> None:
        dims = range(len(entry.shape))
        self._dim = max(
            dims, key=lambda dim: len({chunk.offsets[dim] for chunk in entry.pieces}), default=None
        )
        if self._dim is None:
            self._chunks, self._starts, self._longest = entry.pieces, [0] * len(entry.pieces), 0
        else:
            dim = self._dim
            self._chunks = sorted(entry.pieces, key=lambda chunk: chunk.offsets[dim])
            self._starts = [chunk.offsets[dim] for chunk in self._chunks]
            self._longest = max((chunk.shape[dim] for chunk in self._chunks), default=0)

    def near(self, region: ShardRegion) -> Iterator[ChunkMetadata]:
        """Yield all chunks that may share elements with the region."""
        if self._dim is None:
            yield from self._chunks
            return
        # No chunk is longer than the longest one: those that start further before the region end before it.
        start = region.offsets[self._dim]
        first = bisect_right(self._starts, start - self._longest)
        last = bisect_left(self._starts, start + region.shape[self._dim])
        yield from self._chunks[first:last]


def _read_of(chunk: ChunkMetadata, region: ShardRegion, part: torch.Tensor, name: str) -> ReadItem | None:
    """Return what of the chunk belongs into the region of this rank's part; None if nothing does.

    The same elements have three addresses: in the whole tensor (``starts``), in the chunk, where they are read
    (``from_``), and in this rank's part, where they go (``inside``). All have as many numbers as the tensor has dims.
    """
    starts = tuple(map(max, region.offsets, chunk.offsets))
    lengths = tuple(
        min(offset + count, other + size) - start
        for start, offset, count, other, size in zip(
            starts, region.offsets, region.shape, chunk.offsets, chunk.shape, strict=True
        )
    )
    if any(length <= 0 for length in lengths):
        return None
    from_ = tuple(start - offset for start, offset in zip(starts, chunk.offsets, strict=True))
    inside = tuple(
        start - offset + place
        for start, offset, place in zip(starts, region.offsets, region.inside, strict=True)
    )
    return ReadItem(
        chunk.file, chunk.key, from_, lengths, ShardRegion(starts, lengths, inside).local_view(part), name
    )


def empty_like(parameter: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Memory for a tensor that is laid out as ``parameter``, if it has its shape, else for the whole of it."""
    if is_dtensor(parameter) and tuple(parameter.shape) == entry.shape:
        return torch.empty_like(parameter, dtype=entry.torch_dtype, requires_grad=False)
    return torch.empty(entry.shape, dtype=entry.torch_dtype, device=local(parameter).device)


class Checkpoint:
    """A checkpoint in a local directory that was verified.

    Raises:
        CheckpointError: its documents don't fit the format.
    """

    def __init__(self, directory: str, manifest: Manifest | None = None) -> None:
        self._store = LocalStore()
        self.directory = directory
        self.manifest = manifest or read_manifest(self._store, directory)
        self.root = root_of(directory, self.manifest)
        _check_ranks(self.manifest, f"{directory}/{MANIFEST}")
        self._readers: dict[str, TensorReader] = {}
        path = f"{self.root}/{TENSORS}"
        self.index: Index = index_from_bytes(self._content(TENSORS), self.manifest, path)

    @property
    def ranks(self) -> list[int]:
        """The ranks whose own state is in it."""
        return list(self.manifest.saved.ranks)

    def state(self) -> Document:
        """Return what is common to all ranks and no tensor, as ``codec.encode`` returned it."""
        document = self._document(STATE)
        checked(CommonState, document, f"{self.root}/{STATE}")
        return document

    def of_rank(self, rank: int) -> Document:
        """Return what this rank alone had."""
        return self._document(rank_file(rank))

    def fill(self, places: Mapping[str, torch.Tensor]) -> None:
        """Read each tensor, or this rank's part of a DTensor, into its place."""
        planned = create_read_items(places, self.index)
        self.check(planned)
        self.read(planned)

    def check(self, planned: Iterable[ReadItem]) -> None:
        """Raise CheckpointError unless the files hold, under each key, the dtype and shape that the index says."""
        keys_of: dict[str, set[str]] = {}
        for one in planned:
            keys_of.setdefault(one.file, set()).add(one.key)

        def check_file(file: str) -> None:
            reader = self._reader(file)
            for key in sorted(keys_of[file]):
                found, expected = reader.describe(key), self._chunks[file, key]
                if found != expected:
                    raise CheckpointError(
                        f"{self.root}/{file}: {key} is {found[0]} of shape {found[1]}, but {TENSORS} says "
                        f"{expected[0]} of shape {expected[1]}. Load another checkpoint."
                    )

        in_parallel(check_file, keys_of)

    @torch.no_grad()
    def read(self, planned: Iterable[ReadItem]) -> None:
        """Fill the places of these items."""
        by_file: dict[str, list[ReadItem]] = {}
        for one in planned:
            by_file.setdefault(one.file, []).append(one)

        def read_file(file: str) -> None:
            reader = self._reader(file)
            for one in by_file[file]:
                values = reader.read(one.key, one.offsets, one.lengths)
                # copy_ would spread a chunk of another shape over the place without a word.
                if values.shape != one.into.shape:
                    raise CheckpointError(
                        f"{self.root}/{file}: {one.key} has shape {tuple(values.shape)} instead of "
                        f"{tuple(one.into.shape)}. Load another checkpoint."
                    )
                one.into.copy_(values)

        in_parallel(read_file, by_file)

    def whole(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors by name, whole, in host memory."""
        places = {}
        for name in dict.fromkeys(names):
            if name not in self.index:
                raise CheckpointError(f"{self.root} has no tensor {name}. Load another checkpoint.")
            places[name] = torch.empty(self.index[name].shape, dtype=self.index[name].torch_dtype)
        self.fill(places)
        return places

    @cached_property
    def _chunks(self) -> dict[tuple[str, str], tuple[str, list[int]]]:
        """The dtype and shape of each chunk, by its file and its key there."""
        return {
            (chunk.file, chunk.key): (entry.dtype, list(chunk.shape))
            for entry in self.index.values()
            for chunk in entry.pieces
        }

    def _reader(self, file: str) -> TensorReader:
        """Return an open file of tensors: its header is read once."""
        if file not in self._readers:
            self._readers[file] = TensorReader(f"{self.root}/{file}")
        return self._readers[file]

    def _content(self, name: str) -> bytes:
        path = f"{self.root}/{name}"
        try:
            return self._store.read(path, LARGEST_JSON_BYTES)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}. Load another checkpoint.") from error

    def _document(self, name: str) -> Document:
        document = parse_json(self._content(name), f"{self.root}/{name}")
        if not isinstance(document, dict):
            raise CheckpointError(f"{self.root}/{name} is not a JSON object. Load another checkpoint.")
        return document


def _check_ranks(manifest: Manifest, path: str) -> None:
    """Raise CheckpointError unless the ranks are some of those that there were, each with a file of its own."""
    saved = manifest.saved
    rising = all(one < other for one, other in zip(saved.ranks, saved.ranks[1:], strict=False))
    if not rising or saved.ranks[-1] >= saved.world_size or len(saved.ranks) > len(manifest.files):
        raise CheckpointError(
            f"{path} was saved by ranks {str(saved.ranks)[:40]} of {saved.world_size}, which is not possible. "
            "Load another checkpoint."
        )
    absent = next((rank for rank in saved.ranks if rank_file(rank) not in manifest.files), None)
    if absent is not None:
        raise CheckpointError(
            f"{path} lists no file {rank_file(absent)} of rank {absent}. Load another checkpoint."
        )
