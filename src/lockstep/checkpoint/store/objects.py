"""Files anywhere that fsspec reaches. The only module that calls fsspec.

Nothing is asked of the place but to put, get, list and delete files; no rename, no lock, no order in which
changes become visible. Every error names the path without credentials.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import fsspec
from fsspec.core import url_to_fs

from lockstep.checkpoint.format.documents import Chunk, Digest, FileRecord
from lockstep.checkpoint.store.base import BLOCK_BYTES, UnreachableError
from lockstep.checkpoint.store.local import described, this_process
from lockstep.checkpoint.store.url import Url
from lockstep.config.values import suggestion
from lockstep.errors import CheckpointError, ConfigError, LockstepError
from lockstep.runtime import process

# One request's part of a file, which is in memory. S3 takes 10,000 parts a file: 160 GiB.
PART_BYTES = 16 << 20


class Objects:
    """Files below one URL. Paths are URLs in the form that ``Url`` shows.

    Raises:
        ConfigError: fsspec knows no such file system, or lacks a package for it.
    """

    def __init__(self, url: Url) -> None:
        self._url = url
        try:
            fsspec.get_filesystem_class(url.protocol)
        except ImportError as error:
            raise ConfigError(
                f"{url.shown} cannot be opened, as fsspec lacks a package for {url.protocol}://. {error}."
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"{url.shown} begins with {url.protocol}://, which fsspec does not know."
                f"{suggestion(url.protocol, fsspec.available_protocols())} Correct it, or install the package that "
                "provides it."
            ) from error
        with self._reaching(url.shown):
            pass

    def put(self, path: str, content: bytes) -> None:
        """Write a small file with this content, in one request; what was there is replaced."""
        try:
            with self._reaching(path) as (file_system, place):
                file_system.pipe_file(place, content)
        except FileNotFoundError as error:
            # There is no such bucket.
            raise self._unreachable(path, error) from self._cause(error)

    def upload(self, path: str, chunks: Iterable[Chunk]) -> FileRecord:
        """Write a file with these contents; a part of it at a time is in memory. Raises OSError."""
        digest = Digest()
        try:
            file_system, place = self._opened(path)
            with file_system.open(place, "wb", block_size=PART_BYTES) as file:
                for block in _blocks(chunks):
                    digest.update(block)
                    file.write(block)
            # No error does not yet say that all has arrived.
            there = self.size(path)
        except LockstepError:
            raise
        except Exception as error:
            # A remote file system may raise anything.
            self._forget_connections()
            raise OSError(self._describe_error(error)) from self._cause(error)
        record = digest.record()
        if there != record.size:
            raise OSError(f"{there} of {record.size} bytes arrived")
        return record

    def get(self, path: str) -> bytes:
        """Return the whole file. Raises FileNotFoundError."""
        with self._reaching(path) as (file_system, place):
            return bytes(file_system.cat_file(place))

    def blocks(self, path: str) -> Iterator[bytes]:
        """Yield the file in pieces of ``PART_BYTES``. Raises FileNotFoundError."""
        size = self.size(path)
        for start in range(0, size, PART_BYTES):
            end = min(start + PART_BYTES, size)
            with self._reaching(path) as (file_system, place):
                block = bytes(file_system.cat_file(place, start=start, end=end))
            if len(block) != end - start:
                raise CheckpointError(
                    f"{path} gave {len(block)} bytes instead of {end - start} from byte {start} on: it was "
                    "changed while it was read. Load another checkpoint."
                )
            yield block

    def size(self, path: str) -> int:
        """Return bytes of a file. Raises FileNotFoundError, also for a folder."""
        with self._reaching(path) as (file_system, place):
            # fsspec keeps listings, but other processes change what is there.
            file_system.invalidate_cache()
            found = file_system.info(place)
            if found["type"] != "file":
                raise FileNotFoundError(path)
            return int(found["size"])

    def exists(self, path: str) -> bool:
        """Return whether there is such a file."""
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    def entries(self, folder: str) -> dict[str, int | None]:
        """Return what lies directly in ``folder``: sizes of files in bytes by name, None for folders.

        Raises:
            CheckpointError: a link or a special file is among them.
        """
        try:
            with self._reaching(folder) as (file_system, place):
                file_system.invalidate_cache()
                listed: list[dict[str, str]] = file_system.ls(place, detail=True)
        except FileNotFoundError:
            return {}
        found: dict[str, int | None] = {}
        for entry in listed:
            path = str(entry["name"]).rstrip("/")
            # Some list a folder in itself.
            if path == place.rstrip("/"):
                continue
            name = path.rpartition("/")[2]
            if entry["type"] not in ("file", "directory"):
                raise CheckpointError(
                    f"{folder}/{name} is a {entry['type']}, but a checkpoint holds plain files. Remove it."
                )
            found[name] = int(entry["size"]) if entry["type"] == "file" else None
        return found

    def tree(self, root: str) -> tuple[dict[str, int], list[str]]:
        """Sizes in bytes of all files below ``root``, and all folders, by relative name."""
        files: dict[str, int] = {}
        folders = []
        pending = [""]
        while pending:
            folder = pending.pop()
            for name, size in self.entries(f"{root}/{folder}".rstrip("/")).items():
                path = f"{folder}/{name}".lstrip("/")
                if size is None:
                    folders.append(path)
                    pending.append(path)
                else:
                    files[path] = size
        return files, folders

    def make_folder(self, folder: str) -> None:
        """Make it where folders are made; elsewhere they come and go with their files."""
        with self._reaching(folder) as (file_system, place):
            file_system.makedirs(place, exist_ok=True)

    def delete(self, path: str) -> None:
        """Remove a file; nothing if there is none."""
        try:
            with self._reaching(path) as (file_system, place):
                file_system.rm_file(place)
        except FileNotFoundError:
            pass

    def delete_folder(self, folder: str) -> None:
        """Remove an empty folder where there are such."""
        # Most have none, and say so in their own ways; an empty one harms nobody.
        with suppress(Exception):
            file_system, place = self._opened(folder)
            file_system.rmdir(place)

    def _opened(self, path: str) -> tuple[fsspec.AbstractFileSystem, str]:
        """Return the file system, of this thread where it needs one for each (fsspec keeps them), and the
        path there.
        """
        file_system, place = url_to_fs(self._url.real(path))
        return file_system, str(place)

    @contextmanager
    def _reaching(self, path: str) -> Iterator[tuple[fsspec.AbstractFileSystem, str]]:
        """Give the file system and the path there. Inside, errors name the path without credentials."""
        try:
            yield self._opened(path)
        except LockstepError:
            raise
        except FileNotFoundError:
            # from None: the cause's text may have the URL with its credentials.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        except Exception as error:
            # A remote file system may raise anything.
            self._forget_connections()
            raise self._unreachable(path, error) from self._cause(error)

    def _unreachable(self, path: str, error: Exception) -> UnreachableError:
        runtime = process.current_runtime()
        return UnreachableError(
            f"Rank {runtime.rank if runtime else 0} cannot reach {path}: {self._describe_error(error)}. Check "
            "the name, the connection and the credentials for it, then call again; what was saved before is untouched."
        )

    def _describe_error(self, error: Exception) -> str:
        return self._url.without_secrets(f"{type(error).__name__}: {error}".rstrip(": ."))

    def _cause(self, error: Exception) -> Exception | None:
        """Return the cause of an error; None where a traceback would show credentials."""
        return None if self._url.userinfo else error

    def _forget_connections(self) -> None:
        """fsspec keeps file systems, also those whose connection has ended."""
        fsspec.get_filesystem_class(self._url.protocol).clear_instance_cache()


def _blocks(chunks: Iterable[Chunk]) -> Iterator[bytes]:
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        for start in range(0, len(view), BLOCK_BYTES):
            yield bytes(view[start : start + BLOCK_BYTES])


OWNER = ".owner.json"
NOBODY = "another run, which has ended"


class Ownership:
    """A record of who writes ``what``, in a file there. Taking it never fails: a run that died cannot hand it back."""

    def __init__(self, objects: Objects, what: str) -> None:
        self.what = what
        self._path = f"{what}/{OWNER}"
        self._objects = objects
        self._run: str | None = None

    def acquire(self) -> None:
        """Take it over; where this object has, see that nobody else did since.

        Raises:
            CheckpointError: another run did; names it.
        """
        if self._run is not None:
            self.check()
            return
        run = secrets.token_hex(8)
        self._objects.put(self._path, json.dumps({"run": run, **this_process()}).encode())
        self._run = run

    def check(self) -> None:
        """Raise CheckpointError where another run has taken it over; nothing if it was not acquired."""
        if self._run is None:
            return
        run, described = self._read()
        if run != self._run:
            raise CheckpointError(
                f"{self.what} was taken over by {described}, and only the run that came last writes there. End "
                "one of the two runs, or save to another directory."
            )

    def release(self) -> None:
        """Remove the record if it is this object's; a place that does not answer keeps it, which stops nobody."""
        run, self._run = self._run, None
        try:
            if run is not None and self._read()[0] == run:
                self._objects.delete(self._path)
        except (CheckpointError, OSError):
            pass

    def _read(self) -> tuple[str, str]:
        """Return the run in the record, and words for it."""
        try:
            record = json.loads(self._objects.get(self._path))
            return str(record["run"]), described(record)
        except FileNotFoundError:
            return "", NOBODY
        except (ValueError, KeyError, TypeError):
            return "", "another run"
