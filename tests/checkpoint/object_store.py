"""A file system for fsspec that can do no more than object stores can, on local files that all processes see.

``objects:///some/folder/bucket.objects/a/key``: objects are files in ``bucket.objects``, under their quoted keys. There
are no folders, no renames, no appends; a put is atomic, an upload in parts is seen when it is closed, and listings are
cached until they are invalidated. ``plain://`` differs in that a put that is interrupted leaves half of the content.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec
from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

BUCKET = ".objects"
Fault = Callable[[str, str], None]
"""Called with "before", "half" or "after", and the operation with its key; raises to fail it."""


class Killed(BaseException):
    """What stands for the end of the process."""


class ObjectStore(AbstractFileSystem):
    protocol = "objects"
    is_put_atomic = True
    fault: Fault | None = None
    operations: list[str] = []
    largest_part = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.listings: dict[str, list[dict[str, Any]]] = {}

    # What the library may use

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        with operation("list", path):
            if path not in self.listings:
                self.listings[path] = self._list(path)
            found = self.listings[path]
        return found if detail else [entry["name"] for entry in found]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        with operation("info", path):
            for entry in self.listings.get(self._parent(path), []):
                if entry["name"] == path:
                    return entry
            file = place_of(path)
            if file.exists():
                return {"name": path, "size": file.stat().st_size, "type": "file"}
            self._list(path)
            return {"name": path, "size": 0, "type": "directory"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        path = self._strip_protocol(path)
        with operation("get", path):
            return place_of(path).read_bytes()[start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        path = self._strip_protocol(path)
        with operation("put", path):
            if ObjectStore.fault is not None and not self.is_put_atomic:
                place_of(path).write_bytes(value[: len(value) // 2])
                ObjectStore.fault("half", f"put {path}")
            put(path, value)

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        with operation("delete", path):
            place_of(path).unlink()

    def invalidate_cache(self, path: str | None = None) -> None:
        self.listings.clear()

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> Upload:
        assert mode == "wb", mode
        return Upload(self, path, mode, block_size or "default", **kwargs)

    # What they have not

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("objects cannot be renamed")

    move = rename = mv_file = cp_file = copy = mv

    def rmdir(self, path: str) -> None:
        raise NotImplementedError("there are no folders")

    def _list(self, path: str) -> list[dict[str, Any]]:
        bucket, prefix = split(path + "/")
        found: dict[str, dict[str, Any]] = {}
        for file in sorted(bucket.iterdir()) if bucket.is_dir() else []:
            key = unquote(file.name)
            if key.startswith(prefix):
                name, is_folder, _ = key.removeprefix(prefix).partition("/")
                size = 0 if is_folder else file.stat().st_size
                kind = "directory" if is_folder else "file"
                found[name] = {"name": f"{path}/{name}", "size": size, "type": kind}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values())


class PlainFiles(ObjectStore):
    protocol = "plain"
    is_put_atomic = False


class Upload(AbstractBufferedFile):
    """An upload in parts."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        part = self.buffer.getvalue()
        ObjectStore.largest_part = max(ObjectStore.largest_part, len(part))
        with operation("part", self.path):
            self.parts.append(part)
        if final:
            with operation("complete", self.path):
                put(self.path, b"".join(self.parts))
        return True


LOCK = threading.Lock()


@contextmanager
def operation(kind: str, path: str) -> Iterator[None]:
    """Tell the fault of it; one operation at a time, as requests arrive."""
    what = f"{kind} {split(path)[1]}"
    with LOCK:
        ObjectStore.operations.append(what)
        if ObjectStore.fault is not None:
            ObjectStore.fault("before", what)
        yield
        if ObjectStore.fault is not None:
            ObjectStore.fault("after", what)


class KilledAt:
    """The process ends in the ``number``-th change of the store, and nothing it does afterwards has an effect."""

    def __init__(self, number: int, when: str) -> None:
        self.number, self.when = number, when
        self.is_dead = False
        self.seen = 0

    def __call__(self, when: str, what: str) -> None:
        if self.is_dead:
            raise Killed(what)
        if when == self.when and what.split()[0] in ("put", "delete", "complete"):
            self.seen += 1
            if self.seen == self.number:
                self.is_dead = True
                raise Killed(what)


class FailsAt:
    """The ``number``-th operation times out, before it takes effect or after; all others work."""

    def __init__(self, number: int, when: str) -> None:
        self.number, self.when = number, when
        self.seen = 0

    def __call__(self, when: str, what: str) -> None:
        if when == self.when:
            self.seen += 1
            if self.seen == self.number:
                raise TimeoutError(f"no answer to {what}")


@contextmanager
def failing(fault: Fault) -> Iterator[None]:
    ObjectStore.fault = fault
    try:
        yield
    finally:
        ObjectStore.fault = None


def split(path: str) -> tuple[Path, str]:
    """The local folder that stands for the bucket, and the key in it."""
    bucket, found, key = path.partition(BUCKET + "/")
    return (Path(bucket + BUCKET), key) if found else (Path(path), "")


def place_of(path: str) -> Path:
    bucket, key = split(path)
    return bucket / quote(key, safe="")


def put(path: str, content: bytes) -> None:
    file = place_of(path)
    file.parent.mkdir(exist_ok=True)
    partial = file.parent.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    partial.write_bytes(content)
    partial.replace(file)


def keys(bucket: Path) -> list[str]:
    return sorted(unquote(file.name) for file in bucket.iterdir()) if bucket.exists() else []


for kind in (ObjectStore, PlainFiles):
    fsspec.register_implementation(kind.protocol, kind, clobber=True)
