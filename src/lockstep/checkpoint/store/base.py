"""What a kind of place for checkpoints can do, and the names that all of them give to files.

A checkpoint is written to a staging area, and published as a whole:

    begin -> write, write, ... -> publish -> remove_replaced (once what was published has been verified)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import ClassVar, Protocol

from lockstep.checkpoint.format.documents import Chunk, FileRecord
from lockstep.errors import CheckpointError

STAGING, REPLACED, REMOVED = ".partial", ".old", ".removed"
BLOCK_BYTES = 4 << 20


class Store(Protocol):
    """A kind of place for checkpoints. Paths are texts, joined with "/"."""

    is_local: ClassVar[bool]
    """Whether its files can be read as they lie; of others a copy is made."""

    def begin(self, directory: str) -> str:
        """Make an empty staging area for a checkpoint that will be ``directory``, and return where it is."""

    def write(self, path: str, chunks: Iterable[Chunk]) -> FileRecord:
        """Write a new file with these contents, on the disk when this returns."""

    def seal(self, path: str) -> FileRecord:
        """Bring a staged file that others wrote onto the disk."""

    def publish(self, directory: str, staging: str, manifest: bytes) -> None:
        """Make the staged files the checkpoint ``directory``; ``manifest`` comes last."""

    def remove_replaced(self, directory: str) -> None:
        """Remove what ``publish`` moved aside."""

    def abandon(self, staging: str) -> None:
        """Remove a staging area; errors are ignored, as ``begin`` removes what is left."""

    def exists(self, directory: str) -> bool:
        """Return whether something is published there."""

    def candidates(self, directory: str) -> list[str]:
        """Return where the checkpoint ``directory`` may be found, best first."""

    def read(self, path: str, limit: int) -> bytes:
        """Return the whole file, of at most ``limit`` bytes."""

    def blocks(self, path: str) -> Iterator[Chunk]:
        """Yield the file in pieces of some MB; each is valid until the next is asked for."""

    def files(self, root: str) -> dict[str, int | None]:
        """Sizes in bytes of all files below ``root``, by relative name; None for links and special files."""

    def children(self, folder: str) -> list[str]:
        """Return names of the directories in ``folder``; none if it does not exist."""

    def move_files(self, directory: str, into: str, names: Iterable[str]) -> None:
        """Move files from one checkpoint to another, which keeps what it has under these names."""

    def remove(self, directory: str, kept: Collection[str] = ()) -> None:
        """Remove a published checkpoint, so that no half of it can be seen; files that are ``kept`` stay there."""

    def free_bytes(self, directory: str) -> int | None:
        """Return bytes that can be written there, where that can be known."""

    def lock(self, path: str, what: str) -> Lock:
        """Return a lock on ``what``, not yet acquired, that others see at ``path``."""


class Lock(Protocol):
    """What one run at a time can hold."""

    def acquire(self) -> None:
        """Take it; nothing if this object holds it. Raises CheckpointError naming the run that does."""

    def release(self) -> None:
        """Let go of it."""


class UnreachableError(CheckpointError):
    """The place of a checkpoint does not answer, so that nothing is known of what is there."""
