"""A verified copy of a remote checkpoint on this machine, for as long as it is read: what each rank does for it."""

from __future__ import annotations

import os
import shutil
import tempfile

from lockstep.checkpoint.format.digest import Digest, FileRecord
from lockstep.checkpoint.format.documents import MANIFEST, Manifest
from lockstep.checkpoint.store.base import Store
from lockstep.checkpoint.store.verify import check_content, check_names, in_parallel, read_manifest, root_of
from lockstep.errors import CheckpointError


def read_listed(store: Store, directory: str) -> Manifest:
    """The manifest of a checkpoint, all files of which are there, each with its size."""
    manifest = read_manifest(store, directory)
    check_names(store, root_of(directory, manifest), manifest)
    return manifest


def make_folder(manifest: Manifest, directory: str) -> str:
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


def download(store: Store, directory: str, manifest: Manifest, names: list[str], folder: str) -> None:
    """Copy these files into ``folder``, and compare what was read with the manifest."""
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
