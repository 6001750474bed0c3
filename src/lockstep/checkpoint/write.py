"""Write what the ranks have of a run's state as one checkpoint: all of it, or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lockstep.checkpoint.added import settle
from lockstep.checkpoint.format.digest import FileRecord
from lockstep.checkpoint.format.documents import Manifest, Saved, entry_of
from lockstep.checkpoint.format.names import check_name
from lockstep.checkpoint.format.tensorfile import TensorFile
from lockstep.checkpoint.store.base import Store
from lockstep.checkpoint.store.verify import in_parallel, verify
from lockstep.comm.collectives import Communicator
from lockstep.comm.together import together
from lockstep.errors import CheckpointError, LockstepError

ELSEWHERE = (
    "Make room there or mend its permissions, or save elsewhere; "
    "checkpoints that were saved before are untouched."
)


@dataclass(frozen=True)
class Members:
    """The ranks that write and read one directory together, and this one among them."""

    rank: int
    ranks: list[int]

    @property
    def is_first(self) -> bool:
        """This rank does what one alone must do: it stages, publishes and prunes."""
        return self.rank == self.ranks[0]

    @property
    def share(self) -> tuple[int, int]:
        """This rank's number among them, and how many they are."""
        return self.ranks.index(self.rank), len(self.ranks)


@dataclass
class Snapshot:
    """What this rank writes: files of tensors, and others by name."""

    tensors: dict[str, TensorFile]
    documents: dict[str, bytes]
    saved: Saved


@dataclass(frozen=True)
class Transaction:
    """One save into ``directory``, staged at ``staging``."""

    store: Store
    directory: str
    staging: str
    members: Members
    communicator: Communicator

    def run(self, snapshot: Snapshot, replaces: bool, afterwards: Callable[[], None] | None = None) -> None:
        """Write, publish and, where an older checkpoint is to be removed, verify first; collective.

        ``replaces``: ``directory`` is there already. ``afterwards`` removes others, on the first rank.

        Raises:
            LockstepError: a rank failed; what was published before is untouched, unless removing was all that failed.
        """
        try:
            with together(self.communicator):
                mine = self._write(snapshot)
            records: dict[str, FileRecord] = {}
            for rank, written in enumerate(self.communicator.gather_object([mine])):
                if rank in self.members.ranks:
                    records.update(written)
            with together(self.communicator):
                if self.members.is_first:
                    self._publish(snapshot.saved, records)
        except BaseException:
            if self.members.is_first:
                self.store.abandon(self.staging)
            raise
        if replaces or afterwards is not None:
            with together(self.communicator):
                self._verify()
            with together(self.communicator):
                if self.members.is_first:
                    self._clean_up(afterwards)

    def _write(self, snapshot: Snapshot) -> dict[str, FileRecord]:
        def write_tensors(name: str) -> FileRecord:
            file = snapshot.tensors[name]
            return self._written(
                name, lambda: self.store.write(f"{self.staging}/{name}", file.chunks()), file
            )

        names = list(snapshot.tensors)
        records = dict(zip(names, in_parallel(write_tensors, names), strict=True))
        for name, content in snapshot.documents.items():
            path = f"{self.staging}/{name}"
            records[name] = self._written(name, lambda p=path, c=content: self.store.write(p, [c]))  # type: ignore[misc]
        return records

    def _written(
        self, name: str, write: Callable[[], FileRecord], file: TensorFile | None = None
    ) -> FileRecord:
        path = f"{self.staging}/{name}"
        with explained(
            lambda: (
                f"Rank {self.members.rank} could not write {path}"
                + (f" at tensor {file.current}" if file is not None and file.current else "")
            ),
            ELSEWHERE,
        ):
            return write()

    def _publish(self, saved: Saved, records: dict[str, FileRecord]) -> None:
        with explained(f"Rank {self.members.rank} could not publish {self.directory}", ELSEWHERE):
            staged = self.store.files(self.staging)
            for name in sorted(staged.keys() - records.keys()):  # made by hooks
                if staged[name] is None:
                    raise CheckpointError(
                        f"{self.staging}/{name} is a link or a special file, but a checkpoint holds plain files. Let "
                        "the hook that runs before save_state write files."
                    )
                records[check_name(name)] = self.store.seal(f"{self.staging}/{name}")
            folder = self.staging.removeprefix(self.directory + "/")
            manifest = Manifest(
                folder="" if folder == self.staging else folder,
                saved=saved,
                files={name: entry_of(record) for name, record in records.items()},
            )
            self.store.publish(self.directory, self.staging, manifest.to_bytes())

    def _verify(self) -> None:
        try:
            verify(self.store, self.directory, self.members.share)
        except CheckpointError as error:
            raise CheckpointError(
                f"Rank {self.members.rank} has read back {self.directory} after it was written, and it is not whole: "
                f"{error} Nothing older was removed; save again, elsewhere if this recurs."
            ) from error

    def _clean_up(self, afterwards: Callable[[], None] | None) -> None:
        what = f"Rank {self.members.rank} has saved {self.directory}, but could not remove what is older"
        with explained(what, "Mend the permissions there: the next save removes it."):
            settle(self.store, self.directory)
            if afterwards is not None:
                afterwards()


@contextmanager
def explained(what: str | Callable[[], str], remedy: str) -> Iterator[None]:
    """Raise what a file system raises, which may be anything of a remote one, as CheckpointError."""
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what if isinstance(what, str) else what()}: {error}. {remedy}") from error


def now() -> str:
    """The time in UTC, as ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
