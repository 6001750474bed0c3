"""Whether a published checkpoint is, bit for bit, what was saved: where it lies, or while it is copied here."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from lockstep.checkpoint.format.documents import LARGEST_JSON_BYTES as LIMIT
from lockstep.checkpoint.format.documents import (
    MANIFEST,
    TENSORS,
    Chunk,
    Digest,
    FileRecord,
    Manifest,
    record_of,
)
from lockstep.checkpoint.format.index import index_from_bytes
from lockstep.checkpoint.store.base import Store, UnreachableError
from lockstep.config.values import join_names
from lockstep.errors import CheckpointError, LockstepError, NoCheckpointError

S = TypeVar("S")
T = TypeVar("T")
MOST_THREADS = 4


class NoManifestError(CheckpointError):
    """There are files, but none says that they are a checkpoint."""


def read_manifest(store: Store, directory: str) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        NoCheckpointError: there is nothing at all.
        NoManifestError: there is something else.
        CheckpointError: it is damaged.
    """
    path = f"{directory}/{MANIFEST}"
    try:
        content = store.read(path, LIMIT)
    except (FileNotFoundError, NotADirectoryError) as error:
        if store.exists(directory):
            raise NoManifestError(
                f"{directory} is no checkpoint, or is damaged: {MANIFEST} is missing. Pass a directory that "
                "save_state wrote."
            ) from error
        raise NoCheckpointError(
            f"There is no checkpoint at {directory}: {MANIFEST} is missing. Pass a directory that save_state wrote."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Load another checkpoint.") from error
    return Manifest.from_bytes(content, path)


def is_published(store: Store, directory: str) -> bool:
    """Return whether a checkpoint was published there, be it whole or damaged."""
    try:
        read_manifest(store, directory)
    except UnreachableError:
        raise
    except (NoCheckpointError, NoManifestError):
        return False
    except CheckpointError:
        return True
    return True


def root_of(directory: str, manifest: Manifest) -> str:
    """Return the folder in which the files are."""
    return f"{directory}/{manifest.folder}" if manifest.folder else directory


def verify_checkpoint(
    store: Store,
    directory: str,
    share: tuple[int, int] = (0, 1),
    seen: Callable[[int], object] = lambda count: None,
) -> Manifest:
    """Compare names and sizes of all files, and the digest of every ``share[1]``-th from number ``share[0]`` on.

    ``seen`` is told of bytes that were read. Returns the manifest.

    Raises:
        NoCheckpointError: nothing was published there.
        CheckpointError: a file is missing, no plain file, of another size or of another content; names it.
    """
    manifest = read_manifest(store, directory)
    root = root_of(directory, manifest)
    check_names(store, root, manifest)

    def check(name: str) -> None:
        check_content(store, root, manifest, name, _hashed(store, f"{root}/{name}", seen))

    in_parallel(check, sorted(manifest.files)[share[0] :: share[1]])
    return manifest


def check_names(store: Store, root: str, manifest: Manifest) -> None:
    """Raise CheckpointError unless the files of the manifest are there, each with its size.

    Others, which were added later, are no part of the checkpoint; see ``folders``.
    """
    try:
        found = store.files(root)
    except OSError as error:
        raise CheckpointError(f"{root} cannot be listed: {error}. Load another checkpoint.") from error
    missing = sorted(manifest.files.keys() - found.keys())
    if missing:
        raise CheckpointError(
            f"{root} lacks {join_names(missing)}, which the manifest "
            f"lists.{_inside(store, root, manifest, missing[0])} Load another checkpoint."
        )
    for name, entry in sorted(manifest.files.items()):
        if found[name] is None:
            raise CheckpointError(
                f"{root}/{name} is a link or a special file, but a checkpoint holds plain files. Replace it by a copy "
                "of its target, or remove it."
            )
        if found[name] != entry.size:
            raise CheckpointError(
                f"{root}/{name} has {found[name]} bytes instead of {entry.size}."
                f"{_inside(store, root, manifest, name)} Load another checkpoint."
            )


def check_content(store: Store, root: str, manifest: Manifest, name: str, record: FileRecord) -> None:
    """Raise CheckpointError unless ``record``, of a file that was read, is the manifest's."""
    if record.blake3 != manifest.files[name].blake3:
        raise CheckpointError(
            f"{root}/{name} is damaged: its BLAKE3 digest is not the manifest's."
            f"{_inside(store, root, manifest, name)} Load another checkpoint."
        )


def _hashed(store: Store, path: str, seen: Callable[[int], object]) -> FileRecord:
    def counted_blocks() -> Iterator[Chunk]:
        for block in store.blocks(path):
            yield block
            seen(len(block))

    try:
        return record_of(counted_blocks())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Load another checkpoint.") from error


def _inside(store: Store, root: str, manifest: Manifest, name: str) -> str:
    """Return a sentence on which tensors are in the file, where that can be known."""
    try:
        path = f"{root}/{TENSORS}"
        index = index_from_bytes(store.read(path, LIMIT), manifest, path)
    except (LockstepError, OSError):
        return ""
    names = [tensor for tensor, entry in index.items() if any(chunk.file == name for chunk in entry.pieces)]
    return f" It holds {join_names(names)}." if names else ""


def in_parallel(work: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """Run ``work`` on each item, in threads where this process has several cores; the first error is raised.

    Not with concurrent.futures, which takes no more work once the main thread has ended: a save in the background
    goes on then.
    """
    items = list(items)
    # Cores that this process may use, not those of the machine.
    threads = min(len(os.sched_getaffinity(0)), MOST_THREADS, len(items))
    pending = deque(enumerate(items))
    results: dict[int, T] = {}
    failures: dict[int, BaseException] = {}

    def take_from_pending() -> None:
        while pending and not failures:
            try:
                number, item = pending.popleft()
            except IndexError:
                # Another thread was faster.
                return
            try:
                results[number] = work(item)
            except BaseException as error:
                failures[number] = error

    others = [threading.Thread(target=take_from_pending, name="checkpoint") for _ in range(threads - 1)]
    for thread in others:
        thread.start()
    take_from_pending()
    for thread in others:
        thread.join()
    if failures:
        # That of the first item, whichever thread was faster.
        raise failures[min(failures)]
    return [results[number] for number in range(len(items))]


# A copy on this machine of a checkpoint that is elsewhere ---------------------------------------------


def read_listed(store: Store, directory: str) -> Manifest:
    """Return the manifest of a checkpoint, all files of which are there, each with its size."""
    manifest = read_manifest(store, directory)
    check_names(store, root_of(directory, manifest), manifest)
    return manifest


def make_folder(manifest: Manifest, directory: str) -> str:
    """Make a temporary folder with the manifest of a checkpoint whose files will lie beside it."""
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

    def fetch(name: str) -> None:
        try:
            record = _copy(store, f"{root}/{name}", f"{folder}/{name}")
        except FileNotFoundError as error:
            raise CheckpointError(f"{root}/{name} is missing: {error}. Load another checkpoint.") from error
        except OSError as error:
            raise CheckpointError(
                f"{root}/{name} could not be copied to {folder}: {error}. Make room there, or set TMPDIR to another "
                "folder."
            ) from error
        check_content(store, root, manifest, name, record)

    in_parallel(fetch, names)


def _copy(store: Store, path: str, into: str) -> FileRecord:
    digest = Digest()
    os.makedirs(os.path.dirname(into), exist_ok=True)
    with open(into, "xb", buffering=0) as file:
        for block in store.blocks(path):
            digest.update(block)
            file.write(block)
    return digest.record()
