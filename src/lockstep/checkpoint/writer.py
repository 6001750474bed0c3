"""What one rank does with the files of a checkpoint that is saved: stage, write, publish, verify. No collective."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

import torch

from lockstep.checkpoint.deferred import DeferredCopies
from lockstep.checkpoint.folders import ELSEWHERE, CheckpointGroup, explained
from lockstep.checkpoint.format.documents import FileRecord, Manifest, Saved, check_name, entry_of
from lockstep.checkpoint.format.tensors import TensorFile
from lockstep.checkpoint.store.base import Store
from lockstep.checkpoint.store.verify import in_parallel, verify_checkpoint
from lockstep.comm.dtensor import local
from lockstep.errors import CheckpointError

BACKGROUND_NICENESS = 10
"""Above that of the process, which may run under ``nice`` itself."""
GREATEST_NICENESS = 19


@dataclass
class StagedState:
    """What this rank writes: files of tensors, and others by name. ``copies`` of tensors are to be made before."""

    tensors: dict[str, TensorFile]
    documents: dict[str, bytes]
    saved: Saved
    copies: DeferredCopies | None = None


@dataclass(frozen=True)
class Writer:
    """This rank's part in writing ``directory``, whose files lie at ``staging`` until they are published."""

    store: Store
    directory: str
    staging: str
    group: CheckpointGroup

    def check_room(self, nbytes: int) -> None:
        """Raise CheckpointError if the coordinator finds less room than all ranks together need."""
        free = self.store.free_bytes(self.directory) if self.group.is_coordinator else None
        if free is not None and free < nbytes:
            raise CheckpointError(
                f"{self.directory} needs {nbytes} bytes, but {free} are free there. Make room or save elsewhere; "
                "checkpoints that were saved before are untouched."
            )

    def write_data(self, staged: StagedState) -> dict[str, FileRecord]:
        """Write this rank's files, tensors in several threads. Returns size and digest of each."""

        def write_tensors(name: str) -> FileRecord:
            file = staged.tensors[name]
            return self._write(name, file.chunks(), file)

        if staged.copies is not None:
            staged.copies.copy()
            yield_to_training()
        names = list(staged.tensors)
        records = dict(zip(names, in_parallel(write_tensors, names), strict=True))
        for name, content in staged.documents.items():
            records[name] = self._write(name, [content])
        return records

    def _write(
        self, name: str, chunks: Iterable[bytes | memoryview], file: TensorFile | None = None
    ) -> FileRecord:
        path = f"{self.staging}/{name}"
        with explained(
            lambda: (
                f"Rank {self.group.rank} could not write {path}"
                + (f" at tensor {file.current}" if file is not None and file.current else "")
            ),
            ELSEWHERE,
        ):
            return self.store.write(path, chunks)

    def publish(self, saved: Saved, written: list[dict[str, FileRecord]]) -> None:
        """Make what all ranks have ``written``, and what hooks left there, the checkpoint; its manifest comes last."""
        records = {name: record for rank in self.group.ranks for name, record in written[rank].items()}
        with explained(f"Rank {self.group.rank} could not publish {self.directory}", ELSEWHERE):
            records |= self.seal_added(records)
            folder = self.staging.removeprefix(self.directory + "/")
            manifest = Manifest(
                folder="" if folder == self.staging else folder,
                saved=saved,
                files={name: entry_of(record) for name, record in records.items()},
            )
            self.store.publish(self.directory, self.staging, manifest.to_bytes())

    def seal_added(self, known: Collection[str]) -> dict[str, FileRecord]:
        """What lies in the staging area beside ``known`` files: hooks have made it.

        Raises:
            CheckpointError: one is no plain file.
        """
        staged = self.store.files(self.staging)
        added = {}
        for name in sorted(staged.keys() - set(known)):
            if staged[name] is None:
                raise CheckpointError(
                    f"{self.staging}/{name} is a link or a special file, but a checkpoint holds plain files. Let the "
                    "hook that runs before save_state write files."
                )
            added[check_name(name)] = self.store.seal(f"{self.staging}/{name}")
        return added

    def verify(self) -> None:
        """Read this rank's share of what was published, and compare digests."""
        try:
            verify_checkpoint(self.store, self.directory, self.group.share)
        except CheckpointError as error:
            raise CheckpointError(
                f"Rank {self.group.rank} read {self.directory} back after it was written, and it is damaged: "
                f"{error} No older checkpoint was removed. Save again, and to another place if this happens "
                "again."
            ) from error

    def abandon(self) -> None:
        """Remove what was staged."""
        if self.group.is_coordinator:
            self.store.abandon(self.staging)


class HostStager:
    """Memory for one copy of what this rank writes, kept from save to save.

    Fresh memory is an order of magnitude slower to fill than memory that was used before.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str], torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies.values())

    @torch.no_grad()
    def stage(
        self, files: dict[str, TensorFile], copies: DeferredCopies | None = None
    ) -> dict[str, TensorFile]:
        """The files with copies of their tensors, complete when this returns, but for those that ``copies`` makes."""
        before, self._copies = self._copies, {}
        devices, on_host = set(), []
        for file, content in files.items():
            for key, tensor in content.tensors.items():
                source = local(tensor.detach())
                copy = before.pop((file, key), None)
                if copy is None or copy.shape != source.shape or copy.dtype != source.dtype:
                    copy = _host_memory(source)
                self._copies[file, key] = copy
                if copies is not None and copies.defer(copy, source):
                    continue
                if source.device.type == "cpu":
                    on_host.append((copy, source))
                else:
                    copy.copy_(source, non_blocking=True)
                    devices.add(source.device)
        in_parallel(lambda pair: pair[0].copy_(pair[1]), on_host)
        for device in devices:
            torch.accelerator.synchronize(device)
        return {
            file: TensorFile({key: self._copies[file, key] for key in content.tensors})
            for file, content in files.items()
        }


def yield_to_training() -> None:
    """From now on this thread, and those that it starts, run when others leave a core free.

    They get a tenth of a busy core. With less, the next save would have to wait for this one.
    """
    with suppress(OSError, AttributeError):  # of systems whose threads have no priorities of their own
        of_training = os.getpriority(os.PRIO_PROCESS, os.getpid())
        niceness = min(of_training + BACKGROUND_NICENESS, GREATEST_NICENESS)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def _host_memory(source: torch.Tensor) -> torch.Tensor:
    pinned = source.device.type == "cuda"
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)


def now() -> str:
    """The time in UTC, as ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
