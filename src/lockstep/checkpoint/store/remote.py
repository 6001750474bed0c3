"""Checkpoints where nothing can be renamed: object stores, and whatever else fsspec reaches.

A checkpoint is a folder of files, which is never renamed, and a manifest beside it that names the folder:

    <directory>/manifest.json              the commit record: what it names is the checkpoint
    <directory>/files-000002-9b1c02d4/     its files
    <directory>/files-000001-5f00aa17/     the one that it replaced, with a manifest of its own, until it is removed
    <directory>/.owner.json                the run that writes there

Publishing is one put of ``manifest.json``. A process that is killed at any point leaves the old manifest or the new
one, each with all of its files. Where a put can be interrupted half-way, the half is recognised by the digest in it,
and the checkpoint that was set aside takes its place.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Iterator
from typing import ClassVar

from lockstep.checkpoint.format.documents import MANIFEST, OURS, Chunk, FileRecord, Manifest, record_of
from lockstep.checkpoint.store.base import REMOVED, Lock, UnreachableError
from lockstep.checkpoint.store.objects import OWNER, Objects, Ownership
from lockstep.checkpoint.store.url import parse_url
from lockstep.checkpoint.store.verify import in_parallel, read_manifest
from lockstep.errors import CheckpointError, UsageError

FOLDER = re.compile(r"files-(\d{6,})-[0-9a-f]{8}")


class RemoteStore:
    """A ``Store`` of which nothing is asked but to put, get, list and delete files.

    Where a run takes a lock (``lock``), ``publish`` sees first that no other run has taken it over.
    """

    is_local: ClassVar[bool] = False

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._owned: dict[str, Ownership] = {}

    # Writing ----------------------------------------------------------------------------------------

    def begin(self, directory: str) -> str:
        self._refuse_foreign(directory)
        self._recover(directory)
        self._sweep(directory)
        numbers = [0, *(_checkpoint_number(name) for name in self._folders(directory))]
        staging = f"{directory}/files-{max(numbers) + 1:06d}-{secrets.token_hex(4)}"
        self._objects.make_folder(staging)
        return staging

    def write(self, path: str, chunks: Iterable[Chunk]) -> FileRecord:
        return self._objects.upload(path, chunks)

    def seal(self, path: str) -> FileRecord:
        return record_of(self.blocks(path))

    def publish(self, directory: str, staging: str, manifest: bytes) -> None:
        for owned in (directory, directory.rpartition("/")[0]):
            if owned in self._owned:
                self._owned[owned].check()
        # Before the put: a process killed in between leaves the old checkpoint whole, with two manifests.
        self._set_aside(directory)
        path = f"{directory}/{MANIFEST}"
        self._objects.put(path, manifest)
        if self._objects.get(path) != manifest:
            raise CheckpointError(
                f"{path} is not what this run has just written there. Another run writes to it too, or it was "
                "damaged on the way. End the other run, or save again."
            )

    def remove_replaced(self, directory: str) -> None:
        self._sweep(directory)

    def abandon(self, staging: str) -> None:
        directory, _, name = staging.rpartition("/")
        try:
            # ``children`` gave the directory this name.
            if staging.endswith(REMOVED):
                directory = staging.removesuffix(REMOVED)
                if not self.exists(directory):
                    self._remove_ours(directory)
            elif not self._may_be_named(directory, name):
                # A put that failed may have taken effect.
                self._remove_tree(staging)
        except (CheckpointError, OSError):
            pass

    def move_files(self, directory: str, into: str, names: Iterable[str]) -> None:
        """Nothing: what others put beside the folders of files stays where it is."""

    def remove(self, directory: str, kept: Collection[str] = ()) -> None:
        """Remove what is published; what it replaced stays if it is there, and ``begin`` brings it back."""
        manifest = self._manifest(directory)
        # Without a folder the files lie beside the manifest: a checkpoint that was copied here.
        copied = [] if manifest is None or manifest.folder else list(manifest.files)
        # The commit record goes first: from here on nothing is published.
        self._objects.delete(f"{directory}/{MANIFEST}")
        set_aside = self._set_aside_in(directory)
        for name in self._folders(directory):
            if name not in set_aside:
                self._remove_tree(f"{directory}/{name}")
        if not set_aside:
            self._remove_ours(directory)
            for name in copied:
                self._objects.delete(f"{directory}/{name}")

    # Reading ----------------------------------------------------------------------------------------

    def exists(self, directory: str) -> bool:
        return self._objects.exists(f"{directory}/{MANIFEST}")

    def candidates(self, directory: str) -> list[str]:
        found = [directory] if self.exists(directory) else []
        found += [f"{directory}/{name}" for name in self._set_aside_in(directory)]
        return found or [directory]

    def read(self, path: str, limit: int) -> bytes:
        size = self._objects.size(path)
        if size > limit:
            raise CheckpointError(
                f"{path} has {size} bytes, but at most {limit} are read. Load another checkpoint."
            )
        return self._objects.get(path)

    def blocks(self, path: str) -> Iterator[Chunk]:
        return self._objects.blocks(path)

    def files(self, root: str) -> dict[str, int | None]:
        """Return the files without the records that are no part of what was saved: the manifest and the owner."""
        found, _ = self._objects.tree(root)
        return {name: size for name, size in found.items() if name not in (MANIFEST, OWNER)}

    def children(self, folder: str) -> list[str]:
        """Directories without a manifest, which were never published or half removed, end in ``REMOVED`` here."""
        names = [name for name, size in self._objects.entries(folder).items() if size is None]
        published = in_parallel(lambda name: self.exists(f"{folder}/{name}"), names)
        return [name if there else name + REMOVED for name, there in zip(names, published, strict=True)]

    def free_bytes(self, directory: str) -> int | None:
        return None

    def lock(self, path: str, what: str) -> Lock:
        """Return a lock whose record lies in ``what`` and not at ``path``: beside a bucket there is no place."""
        return self._owned.setdefault(what, Ownership(self._objects, what))

    # The layout -------------------------------------------------------------------------------------

    def _folders(self, directory: str) -> list[str]:
        """Return names of the folders of files, the newest first."""
        names = [name for name, size in self._objects.entries(directory).items() if size is None]
        return sorted(filter(FOLDER.fullmatch, names), key=_checkpoint_number, reverse=True)

    def _manifest(self, directory: str) -> Manifest | None:
        """Return what is published; None if nothing is, or if it is damaged."""
        try:
            return read_manifest(self, directory)
        except UnreachableError:
            raise
        except CheckpointError:
            return None

    def _may_be_named(self, directory: str, folder: str) -> bool:
        """Return whether the manifest names the folder; one that is damaged may name any."""
        manifest = self._manifest(directory)
        return self.exists(directory) if manifest is None else manifest.folder == folder

    def _set_aside_in(self, directory: str) -> list[str]:
        """Return the folders with a manifest of their own that ``manifest.json`` does not name, the newest
        first.
        """
        found = [
            name
            for name in self._folders(directory)
            if self._objects.exists(f"{directory}/{name}/{MANIFEST}")
        ]
        manifest = self._manifest(directory) if found else None
        return [name for name in found if manifest is None or name != manifest.folder]

    def _set_aside(self, directory: str) -> None:
        """Give the published folder a manifest of its own, as the one beside it will be replaced."""
        manifest = self._manifest(directory)
        if manifest is not None:
            alone = manifest.model_copy(update={"folder": ""})
            self._objects.put(f"{directory}/{manifest.folder}/{MANIFEST}", alone.to_bytes())

    def _recover(self, directory: str) -> None:
        """Publish again what was set aside, where what had replaced it was removed."""
        if self.exists(directory):
            return
        for name in self._set_aside_in(directory):
            alone = self._manifest(f"{directory}/{name}")
            if alone is not None:
                again = alone.model_copy(update={"folder": name})
                self._objects.put(f"{directory}/{MANIFEST}", again.to_bytes())
                return

    def _sweep(self, directory: str) -> None:
        """Remove the folders that the manifest cannot name."""
        for name in self._folders(directory):
            if not self._may_be_named(directory, name):
                self._remove_tree(f"{directory}/{name}")

    def _remove_tree(self, root: str) -> None:
        """Manifests first, so that nothing that lacks files can be taken for a checkpoint."""
        files, folders = self._objects.tree(root)
        for name in [name for name in files if name.rpartition("/")[2] == MANIFEST]:
            self._objects.delete(f"{root}/{name}")
            del files[name]
        in_parallel(lambda name: self._objects.delete(f"{root}/{name}"), files)
        for folder in sorted(folders, key=len, reverse=True):
            self._objects.delete_folder(f"{root}/{folder}")
        self._objects.delete_folder(root)

    def _remove_ours(self, directory: str) -> None:
        """Remove the folders of files and the records, and the directory where nothing else is in it."""
        for name in self._folders(directory):
            self._remove_tree(f"{directory}/{name}")
        # A checkpoint that was copied there has no folder of its own.
        for name in self._objects.entries(directory):
            if name in (MANIFEST, OWNER) or OURS.fullmatch(name):
                self._objects.delete(f"{directory}/{name}")
        self._objects.delete_folder(directory)

    def _refuse_foreign(self, directory: str) -> None:
        """Raise UsageError where a checkpoint would be mixed with something else, unless it is there already."""
        manifest = self._manifest(directory)
        # What lies beside that folder was added, and stays.
        if manifest is not None and manifest.folder:
            return
        others = [
            name
            for name, size in self._objects.entries(directory).items()
            if name not in (MANIFEST, OWNER) and not (size is None and FOLDER.fullmatch(name))
        ]
        if self._objects.exists(directory):
            others = [directory.rpartition("/")[2]]
        if others:
            raise UsageError(
                f"{directory} holds {', '.join(sorted(others)[:3])}, which save_state did not write there. Pass "
                "a directory that does not exist yet."
            )


def _checkpoint_number(folder: str) -> int:
    match = FOLDER.fullmatch(folder)
    assert match is not None
    return int(match[1])


def remote_store(text: str) -> tuple[RemoteStore, str]:
    """Return the store of a URL, and the URL as messages may show it.

    Raises:
        ConfigError: fsspec cannot open it, or nothing can lie below it.
        CheckpointError: the place does not answer.
    """
    url = parse_url(text)
    return RemoteStore(Objects(url)), url.shown
