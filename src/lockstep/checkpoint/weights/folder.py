"""Put weights into a local folder such that it can be loaded at any time.

Readers such as transformers take ``model.safetensors`` if it is there, else the shards that the index names. Everything
is first written beside what is there, under names that end in ``.partial``, and synced. Then one operation makes the
folder's weights the new ones:

    one file     renaming it to model.safetensors
    shards       renaming the index; where there was one file, removing that

Shards of an earlier save are not overwritten: new ones of the same names get other names at first. When the new index
is there, the old shards are removed, and the new ones get their names by links. Wherever the process is killed, the
folder has the earlier weights or the new ones, whole. Configurations that differ are replaced just before the weights:
only a process killed between the two leaves new configurations with old weights.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import count
from types import TracebackType

import torch

from lockstep.checkpoint.format.tensors import in_parts
from lockstep.checkpoint.store.base import Lock
from lockstep.checkpoint.store.local import LocalStore, sync
from lockstep.checkpoint.weights import INDEX, WEIGHTS
from lockstep.checkpoint.weights.streams import Elements, check_room, unwritten, write_tensor_file
from lockstep.errors import CheckpointError, UsageError

PARTIAL = ".partial"
CONFIGURATIONS = ("config.json", "generation_config.json")
SHARDS = re.compile(r"model(-\d{1,4})?-\d{5}-of-\d{5}\.safetensors")


def into_shards(tensors: Mapping[str, torch.Tensor], limit: int) -> dict[str, list[str]]:
    """Return names of tensors by file, such that no file holds more than ``limit`` bytes unless one tensor does."""
    shards = in_parts(tensors, lambda name: tensors[name].nbytes, limit)
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {_shard("model", number, len(shards)): names for number, names in enumerate(shards, start=1)}


def _shard(prefix: str, number: int, total: int) -> str:
    return f"{prefix}-{number:05d}-of-{total:05d}.safetensors"


def write_folder(
    directory: str,
    tensors: Mapping[str, torch.Tensor],
    elements: Elements,
    limit: int,
    documents: Mapping[str, bytes],
) -> None:
    """Make these tensors the weights of a folder, in files of at most ``limit`` bytes, with other files by name.

    Raises:
        CheckpointError: something could not be written; the folder's weights are those of before.
    """
    shards = into_shards(tensors, limit)
    with WeightsFolder(directory) as folder:
        check_room(directory, sum(tensor.nbytes for tensor in tensors.values()))
        for file, names in shards.items():
            folder.write(file, {name: tensors[name] for name in names}, elements)
        for name, content in documents.items():
            folder.add(name, content)
        folder.publish(shards, sum(tensor.nbytes for tensor in tensors.values()))


class WeightsFolder:
    """Replaces the weights in a folder; as a context, of which leaving removes what was not published."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._store = LocalStore()
        self._staged: list[str] = []
        self._documents: list[str] = []
        self._lock: Lock | None = None

    def __enter__(self) -> WeightsFolder:
        try:
            if not os.path.isdir(self.directory):
                os.makedirs(self.directory, exist_ok=True)
                sync(os.path.dirname(os.path.abspath(self.directory)))
            lock = self._store.lock(self._path(".model.lock"), self.directory)
            lock.acquire()
            self._lock = lock
            # Left by a process that was killed.
            for name in os.listdir(self.directory):
                if name.endswith(PARTIAL) and _is_ours(name.removesuffix(PARTIAL)):
                    os.unlink(self._path(name))
        except OSError as error:
            self._unlock()
            raise unwritten(self.directory, error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in (*self._staged, *self._documents, INDEX):
            remove_quietly(self._path(name + PARTIAL))
        self._unlock()

    def write(self, file: str, tensors: Mapping[str, torch.Tensor], elements: Elements) -> None:
        """Write one file of the new weights, and read it again where it will replace others."""
        self._staged.append(file)
        path = self._path(file + PARTIAL)
        write_tensor_file(path, tensors, elements, verified=self._has_weights())

    def add(self, name: str, content: bytes) -> None:
        """Write a configuration, unless it is there with this content."""
        path = self._path(name)
        if self._has(path, content):
            return
        remove_quietly(path + PARTIAL)
        self._documents.append(name)
        self._guarded(path, lambda: self._store.write(path + PARTIAL, [content]))

    def _has(self, path: str, content: bytes) -> bool:
        try:
            return os.path.getsize(path) == len(content) and self._store.read(path, len(content)) == content
        except OSError:
            # It is not there, is a link, or cannot be read.
            return False

    def publish(self, shards: Mapping[str, list[str]], total_bytes: int) -> None:
        """Make what was written the folder's weights, and remove others."""
        self._guarded(self.directory, lambda: self._publish(shards, total_bytes))

    def _publish(self, shards: Mapping[str, list[str]], total_bytes: int) -> None:
        if WEIGHTS in shards:
            self._put_documents()
            os.rename(self._path(WEIGHTS + PARTIAL), self._path(WEIGHTS))
            sync(self.directory)
            # Until here the index, if there was one, named whole weights.
            self._remove({INDEX})
            self._remove(self._shards_except(()))
            return
        first_names = self._free_names(list(shards))
        for name, first_name in first_names.items():
            os.rename(self._path(name + PARTIAL), self._path(first_name))
        self._put_documents()
        self._put_index(shards, first_names, total_bytes)
        self._remove({WEIGHTS})
        self._remove(self._shards_except(first_names.values()))
        if any(name != first_name for name, first_name in first_names.items()) and self._link(first_names):
            self._put_index(shards, {name: name for name in shards}, total_bytes)
            self._remove(self._shards_except(shards))

    def _put_documents(self) -> None:
        for name in self._documents:
            os.rename(self._path(name + PARTIAL), self._path(name))

    def _put_index(self, shards: Mapping[str, list[str]], names: Mapping[str, str], total_bytes: int) -> None:
        # An index must not reach the disk before the names of its shards.
        sync(self.directory)
        places = {tensor: names[file] for file, tensors in shards.items() for tensor in tensors}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
        partial = self._path(INDEX + PARTIAL)
        self._store.write(partial, [json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"])
        os.rename(partial, self._path(INDEX))
        sync(self.directory)

    def _free_names(self, shards: list[str]) -> dict[str, str]:
        """Return for each shard a name that no file has."""
        for number in count(1):
            prefix = "model" if number == 1 else f"model-{number}"
            names = {name: prefix + name.removeprefix("model") for name in shards}
            if not any(os.path.lexists(self._path(name)) for name in names.values()):
                return names
        raise AssertionError

    def _link(self, names: Mapping[str, str]) -> bool:
        """Give shards their own names beside those that they have; False where the file system has no links."""
        made: list[str] = []
        try:
            for name, first_name in names.items():
                os.link(self._path(first_name), self._path(name))
                made.append(name)
        except OSError:
            for name in made:
                os.unlink(self._path(name))
            return False
        return True

    def _shards_except(self, kept: Iterable[str]) -> set[str]:
        return {name for name in os.listdir(self.directory) if SHARDS.fullmatch(name)} - set(kept)

    def _remove(self, names: set[str]) -> None:
        present = sorted(name for name in names if os.path.lexists(self._path(name)))
        for name in present:
            try:
                os.unlink(self._path(name))
            except OSError as error:
                raise CheckpointError(
                    f"{self._path(name)} of an earlier save could not be removed: {error}. The new weights are "
                    "in the folder. Remove the old file yourself, because it may be loaded instead of them."
                ) from error
        if present:
            sync(self.directory)

    def _has_weights(self) -> bool:
        return any(os.path.lexists(self._path(name)) for name in (WEIGHTS, INDEX))

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _guarded(self, path: str, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            raise unwritten(path, error) from error


def _is_ours(name: str) -> bool:
    return name in (WEIGHTS, INDEX, *CONFIGURATIONS) or bool(SHARDS.fullmatch(name))


def local_directory(path: str | os.PathLike[str]) -> str:
    """Return ``path`` as text, if it is no URL and no file.

    Raises:
        UsageError: it is.
    """
    text = os.fspath(path)
    if "://" in text and not text.startswith("file://"):
        raise UsageError(
            f"{text} is a URL, but weights are written to a local folder. Pass a local folder, and copy it to "
            "the URL afterwards."
        )
    text = os.path.normpath(os.path.expanduser(text.removeprefix("file://")))
    if os.path.lexists(text) and not os.path.isdir(text):
        raise UsageError(f"{text} is a file, but weights are written to a folder. Pass the name of a folder.")
    return text


def remove_quietly(path: str) -> None:
    """Remove a file if it is there and that is possible."""
    with suppress(OSError):
        os.unlink(path)
