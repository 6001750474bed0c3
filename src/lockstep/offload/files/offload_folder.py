"""A folder of weights that were moved out of memory: safetensors files, and an index of who is where.

``index.json`` is name -> ``safetensors_file`` (in the folder), ``weight_name`` (in the file), ``dtype``, ``shape``,
``source`` (the file it was made from, as of then). Entries without a file are those of Accelerate: raw bytes in
``<name>.dat``.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod

import torch

from lockstep.config.files import check_plain_file, read_plain_file, replacing
from lockstep.config.values import repr_short
from lockstep.errors import CheckpointError, OffloadError
from lockstep.offload.device_map.memory import dtype_of
from lockstep.offload.files.checkpoint_files import header_bytes, read_header
from lockstep.offload.files.stored import FileRegion, MappedFiles, as_bytes, read

INDEX = "index.json"
LARGEST_INDEX_BYTES = 128 << 20


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor that is to be in the folder. ``source``: what ``pieces`` reads, or nothing for tensors in memory."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    pieces: Callable[[], Iterator[torch.Tensor]]
    source: str = ""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def index_of(folder: str) -> dict[str, dict[str, object]]:
    """Return the entries of a folder's index; none where there is no folder or index.

    Raises:
        OffloadError: it cannot be read.
    """
    path = os.path.join(folder, INDEX)
    try:
        index = json.loads(read_plain_file(path, LARGEST_INDEX_BYTES))
    except FileNotFoundError:
        return {}
    except CheckpointError as error:
        raise OffloadError(str(error)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise _unfit(folder, f"its index cannot be read ({error})") from error
    if not isinstance(index, dict) or not all(isinstance(entry, dict) for entry in index.values()):
        raise _unfit(folder, "its index is not a mapping of weights")
    return index


def regions_of(index: Mapping[str, Mapping[str, object]], folder: str | None) -> dict[str, FileRegion]:
    """Return where the weights of an index are. Paths in it are absolute or relative to ``folder``.

    Raises:
        OffloadError: a file is missing, damaged, or does not have what the index says.
    """
    headers: dict[str, dict[str, FileRegion]] = {}
    found = {}
    for name, entry in index.items():
        file = entry.get("safetensors_file")
        try:
            if file is None:
                found[name] = _raw_region(os.path.join(folder or "", f"{name}.dat"), entry)
                continue
            path = os.path.join(folder or "", str(file))
            if path not in headers:
                check_plain_file(path)
                headers[path] = read_header(path)
            found[name] = headers[path][str(entry.get("weight_name", name))]
        except CheckpointError as error:
            raise OffloadError(str(error)) from error
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise _unfit(
                folder or "", f"it does not have {repr_short(name)}, which is in its index ({error})"
            ) from error
    return found


def _raw_region(path: str, entry: Mapping[str, object]) -> FileRegion:
    dtype = dtype_of(str(entry["dtype"]))
    assert dtype is not None
    check_plain_file(path)
    shape = entry["shape"]
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 2**60 for size in shape):
        raise ValueError(f"its shape is {repr_short(shape)}")
    region = FileRegion(path, 0, dtype, torch.Size(shape))
    if os.path.getsize(path) < region.nbytes:
        raise ValueError(f"{path} has {os.path.getsize(path)} bytes instead of {region.nbytes}")
    return region


def write_to_folder(folder: str, tensors: list[TensorToWrite]) -> dict[str, FileRegion]:
    """Have these tensors in the folder, which is made if missing. Those that are there already are not written again.

    Raises:
        OffloadError: the folder holds other values under one of the names, cannot be written, or has too little
            space; nothing of what was to be written remains then.
    """
    with _locked(folder):
        index = index_of(folder)
        there = regions_of({item.name: index[item.name] for item in tensors if item.name in index}, folder)
        for item in tensors:
            if item.name in there:
                _check_fits(folder, item, there[item.name], str(index[item.name].get("source", "")))
        new = [item for item in tensors if item.name not in there]
        if new:
            part = _write_part(folder, new)
            for item in new:
                index[item.name] = {
                    "safetensors_file": part,
                    "weight_name": item.name,
                    "dtype": str(item.dtype).removeprefix("torch."),
                    "shape": list(item.shape),
                    "source": item.source,
                }
            # Last: a file without an entry here is never read.
            _write_index(folder, index)
            there |= regions_of({item.name: index[item.name] for item in new}, folder)
    return there


def _check_fits(folder: str, item: TensorToWrite, region: FileRegion, source: str) -> None:
    if (region.dtype, region.shape) != (item.dtype, item.shape):
        raise _unfit(
            folder,
            f"it holds {repr_short(item.name)} as {region.dtype} of shape {tuple(region.shape)}, but the model needs "
            f"{item.dtype} of shape {tuple(item.shape)}",
        )
    # Made of the same part of the same file, unchanged since: nothing needs to be compared.
    if source and source == item.source:
        return
    if not _holds(region, item.pieces()):
        raise _unfit(folder, f"it holds other values of {repr_short(item.name)} than the model")


def _holds(region: FileRegion, pieces: Iterator[torch.Tensor]) -> bool:
    files = MappedFiles()
    mapped = region.mapped(files)
    stored = (read(region, files, region.dtype) if mapped is None else mapped).view(-1)
    done = 0
    for piece in pieces:
        same = stored[done : done + piece.numel()]
        if not torch.equal(as_bytes(same), as_bytes(piece)):
            return False
        # Pages that were compared leave memory: the tensor may be larger than it.
        files.pages(same).drop()
        done += piece.numel()
    return True


def _write_part(folder: str, tensors: list[TensorToWrite]) -> str:
    """Write a new file of these tensors, one at a time, and return its name."""
    needed = sum(item.nbytes for item in tensors)
    partial = ""
    try:
        descriptor, partial = tempfile.mkstemp(prefix="offload-", suffix=".partial", dir=folder)
        header = header_bytes({item.name: (item.dtype, item.shape) for item in tensors})
        with open(descriptor, "wb") as file:
            if hasattr(os, "posix_fallocate"):
                # A disk that is too small is found here.
                os.posix_fallocate(descriptor, 0, len(header) + needed)
            file.write(header)
            for item in tensors:
                for piece in item.pieces():
                    file.write(as_bytes(piece.contiguous()).numpy().data)
        # As files are mostly made; those of mkstemp are for this user alone.
        os.chmod(partial, 0o644)
        number = 1
        while os.path.exists(os.path.join(folder, _part(number))):
            number += 1
        os.rename(partial, os.path.join(folder, _part(number)))
        return _part(number)
    except OSError as error:
        raise _unwritten(folder, needed, error) from error
    finally:
        with suppress(OSError):
            os.unlink(partial)


def _write_index(folder: str, index: Mapping[str, object]) -> None:
    try:
        with replacing(os.path.join(folder, INDEX)) as file:
            file.write(json.dumps(index, indent=2).encode())
    except OSError as error:
        raise _unwritten(folder, 0, error) from error


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Alone in the folder among processes, such as ranks that offload the same weights."""
    try:
        os.makedirs(folder, exist_ok=True)
        descriptor = os.open(
            os.path.join(folder, ".offload.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644
        )
    except OSError as error:
        raise _unwritten(folder, 0, error) from error
    try:
        # Some network file systems have no locks.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _part(number: int) -> str:
    return f"offload-{number:05d}.safetensors"


def _unfit(folder: str, why: str) -> OffloadError:
    return OffloadError(f"The offload folder {folder} cannot be used: {why}. Remove it, or name another.")


def _unwritten(folder: str, needed: int, error: OSError) -> OffloadError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(folder).free
        return OffloadError(
            f"Offloading needs {needed} bytes in {folder}, where {free} are free ({error.strerror}). Free some "
            "space, or name a folder on a larger disk."
        )
    return OffloadError(
        f"Nothing can be offloaded to {folder}: {error.strerror or error}. Name a folder on a local disk that this "
        "user may write to."
    )
