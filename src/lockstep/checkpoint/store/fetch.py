"""A verified copy of a remote checkpoint on each machine, for as long as it is read."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.checkpoint.format.digest import Digest, FileRecord
from lockstep.checkpoint.format.documents import Manifest
from lockstep.checkpoint.format.names import MANIFEST
from lockstep.checkpoint.store.base import Store
from lockstep.checkpoint.store.verify import check_content, check_names, in_parallel, read_manifest, root_of
from lockstep.comm.collectives import Communicator
from lockstep.comm.together import together
from lockstep.errors import CheckpointError


@contextmanager
def fetched(store: Store, directory: str, is_first: bool, communicator: Communicator) -> Iterator[str]:
    """A new folder on this machine with the checkpoint, removed afterwards; collective.

    Each file is read once a machine, its ranks share the work, and its size and digest are compared meanwhile.
    The folder is where ``tempfile`` makes them (``TMPDIR``), and only this user can open it.

    Raises:
        NoCheckpointError: nothing was published there.
        CheckpointError: a file is missing, extra, of another size or content; or there is no room for them here.
    """
    runtime = communicator.runtime
    found: list[Manifest] = []
    with together(communicator):
        if is_first:  # what one rank sees is what all load, should another run replace it now
            found.append(read_manifest(store, directory))
            check_names(store, root_of(directory, found[0]), found[0])
    manifest: Manifest = communicator.gather_object(found)[0]
    mine = ""
    try:
        with together(communicator):
            if runtime.is_local_main:
                mine = _folder_for(manifest, directory)
        folder: str = communicator.gather_object([mine])[runtime.rank - runtime.local_rank]
        with together(communicator):
            share = slice(runtime.local_rank, None, runtime.local_world_size)
            _download(store, directory, manifest, sorted(manifest.files)[share], folder)
        yield folder
    finally:
        if mine:
            shutil.rmtree(mine, ignore_errors=True)


def _folder_for(manifest: Manifest, directory: str) -> str:
    """A temporary folder with the manifest of a checkpoint whose files will lie beside it."""
    needed = sum(entry.size for entry in manifest.files.values())
    try:
        folder = tempfile.mkdtemp(prefix="lockstep-load-")
    except OSError as error:
        raise CheckpointError(
            f"There is no temporary folder for a copy of {directory}: {error}. Set TMPDIR to one."
        ) from error
    try:
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise CheckpointError(
                f"A copy of {directory} needs {needed} bytes, but {free} are free in {tempfile.gettempdir()}. Make "
                "room there, or set TMPDIR to another folder."
            )
        with open(f"{folder}/{MANIFEST}", "wb") as file:
            file.write(manifest.model_copy(update={"folder": ""}).to_bytes())
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _download(store: Store, directory: str, manifest: Manifest, names: list[str], folder: str) -> None:
    root = root_of(directory, manifest)

    def download(name: str) -> None:
        try:
            record = _copy(store, f"{root}/{name}", f"{folder}/{name}")
        except FileNotFoundError as error:
            raise CheckpointError(f"{root}/{name} is gone: {error}. Load another checkpoint.") from error
        except OSError as error:
            raise CheckpointError(
                f"{root}/{name} could not be copied to {folder}: {error}. Make room there, or set TMPDIR to another "
                "folder."
            ) from error
        check_content(store, root, manifest, name, record)

    in_parallel(download, names)


def _copy(store: Store, path: str, into: str) -> FileRecord:
    digest = Digest()
    os.makedirs(os.path.dirname(into), exist_ok=True)
    with open(into, "xb", buffering=0) as file:
        for block in store.blocks(path):
            digest.update(block)
            file.write(block)
    return digest.record()
