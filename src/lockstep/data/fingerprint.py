"""What tells which rows a data set has, compared between ranks: each must have the whole data."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep.comm.tree import leaves
from lockstep.errors import UsageError

TOLD = 16
"""So many characters or numbers, at most, of each part of a sample go into the checksum of a stream."""

WHOLE = {f"{sign}int{bits}" for sign in ("", "u") for bits in (16, 32, 64)}
"""Types of whole numbers that count. Of bytes (images) and floats, an augmentation may draw others."""

COMPARED = 64
"""Rows of which a checksum is made: some from the beginning to the end."""

Fingerprint = Mapping[str, int]
"""Checksums by the names of what they are of."""

ADVICE = (
    "prepare() divides one data set over the ranks, so samples would be lost or be in two splits. Give every rank the "
    "whole data, and draw random splits with one seed on all ranks: random_split(..., "
    "generator=torch.Generator().manual_seed(0))."
)


def check_undivided(loader: DataLoader[object], ranks: int) -> None:
    """Raise UsageError for data that a library has divided already, or divides by itself."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) and (library := _library_that_divides(type(dataset))):
        raise UsageError(
            f"{type(dataset).__name__} of {library} gives each of {ranks} ranks other samples by itself, so prepare() "
            "cannot divide it. Leave its loader out of prepare(), pass it to register_for_checkpointing(), and move "
            "its batches to accelerator.device."
        )
    # Of the datasets library.
    config = getattr(dataset, "_distributed", None)
    by = "split_dataset_by_node" if getattr(config, "world_size", 1) > 1 else ""
    # Of webdataset: its default, single_node_only, raises on several ranks.
    for stage in getattr(dataset, "pipeline", ()) if isinstance(dataset, IterableDataset) else ():
        if (name := getattr(stage, "__name__", "")) in ("split_by_node", "single_node_only"):
            raise UsageError(
                f"{type(dataset).__name__} has the node splitter {name}, but prepare() itself divides the samples over "
                f"{ranks} ranks. Pass nodesplitter=None, or leave the splitter out of the pipeline."
            )
    if by:
        raise UsageError(
            f"{type(dataset).__name__} was divided by {by} already, and prepare() would divide it over {ranks} ranks "
            f"once more: of {ranks} samples it would use one. Leave out {by}."
        )


def fingerprint_of(loader: DataLoader[object]) -> Fingerprint:
    """Compute a fingerprint of the indices, files and other names of rows of a data set: it tells one split from
    another."""
    return dict(_found(loader.dataset, type(loader.dataset).__name__, 4))


def _library_that_divides(kind: type) -> str:
    """Return litdata or streaming (of MosaicML), if ``kind`` is a data set of theirs."""
    modules = [base.__module__ for base in kind.__mro__]
    found = [name for name in modules if name.startswith(("litdata.", "streaming.base."))]
    return found[0].partition(".")[0] if found else ""


def digest_of(samples: Iterable[object], digest: int) -> int:
    """Continue the checksum of a stream by the texts and whole numbers that tell these samples from others."""
    return zlib.crc32("".join([repr(_told(sample)) for sample in samples]).encode(), digest)


def _told(part: Any) -> object:
    if isinstance(part, (str, bytes, int)):
        return part[:TOLD] if isinstance(part, (str, bytes)) else part
    if isinstance(part, Mapping):
        return [_told(value) for value in part.values()]
    if isinstance(part, (list, tuple)):
        return [_told(value) for value in part[:TOLD]]
    is_array = isinstance(part, (np.integer, np.ndarray))
    if is_array or (isinstance(part, torch.Tensor) and part.layout is torch.strided):
        return part.reshape(-1)[:TOLD].tolist() if str(part.dtype).rpartition(".")[2] in WHOLE else None
    return None


def check_same(own: Fingerprint, main: Fingerprint, rank: int) -> None:
    """Raise UsageError where this rank has other rows than rank 0. A rank that reads nothing may have none."""
    for name, checksum in own.items():
        if main.get(name, checksum) != checksum:
            raise UsageError(f"{name} has other rows on rank {rank} than on rank 0. {ADVICE}")


def _found(dataset: Any, name: str, depth: int) -> Iterator[tuple[str, int]]:
    if isinstance(dataset, (list, tuple)):
        yield from _of_rows(dataset, name)
        return
    if (
        hasattr(dataset, "_fingerprint")
        and hasattr(dataset, "with_format")
        and hasattr(dataset, "__getitem__")
    ):
        # Of the datasets library: rows as they are stored, before any transform.
        rows = dataset.with_format("arrow")
        yield from _of_rows([rows[i].to_pylist() for i in _places(len(rows))], name)
        return
    is_stream = isinstance(dataset, IterableDataset)
    for attribute, value in getattr(dataset, "__dict__", {}).items() if depth else ():
        path = f"{name}.{attribute}"
        if isinstance(value, Dataset):
            yield from _found(value, path, depth - 1)
        elif attribute == "datasets" and isinstance(value, (list, tuple)):
            for number, part in enumerate(value):
                yield from _found(part, f"{path}[{number}]", depth - 1)
        elif attribute == "indices" and hasattr(value, "tolist"):
            yield from _of_rows(value.tolist(), path)
        # A list of another length is not of rows: it may be of this rank's own affairs.
        elif isinstance(value, (list, tuple)) and (is_stream or len(value) == len(dataset)):
            yield from _of_rows(value, path)


def _of_rows(rows: Sequence[object], name: str) -> Iterator[tuple[str, int]]:
    """Texts and whole numbers only: a rank may draw or compute others for itself."""
    parts = [
        # Hosts may keep one data set in different folders.
        leaf.rsplit("/", 1)[-1] if isinstance(leaf, str) else leaf
        for place in _places(len(rows))
        for leaf in leaves(rows[place]).values()
        if isinstance(leaf, (str, int, bytes))
    ]
    if parts:
        yield name, zlib.crc32(repr((len(rows), parts)).encode())


def _places(rows: int) -> Sequence[int]:
    step = max(1, rows // COMPARED)
    return range(0, rows, step)
