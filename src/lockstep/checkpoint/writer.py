"""One rank's part in a save: what it is asked for and what hooks see; its files, staged, written, published, verified.

No collective.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch

from lockstep.checkpoint.checkpointer import Checkpointer, SaveTarget
from lockstep.checkpoint.contents import CheckpointContents, SaveHook
from lockstep.checkpoint.deferred import DeferredCopies
from lockstep.checkpoint.folders import ELSEWHERE, CheckpointGroup, StagingArea, explained
from lockstep.checkpoint.format.documents import (
    STATE,
    TENSORS,
    FileRecord,
    Manifest,
    Saved,
    canonical,
    check_name,
    entry_of,
    rank_file,
    versions,
)
from lockstep.checkpoint.format.tensors import TensorFile
from lockstep.checkpoint.planner import SavePlan
from lockstep.checkpoint.state import RankState
from lockstep.checkpoint.store.base import Store
from lockstep.checkpoint.store.verify import in_parallel, verify_checkpoint
from lockstep.errors import CheckpointError, UsageError

BACKGROUND_NICENESS = 10
"""Above that of the process, which may run under ``nice`` itself."""
GREATEST_NICENESS = 19


@dataclass
class SaveRequest:
    """One call of ``save`` on this rank: what is saved, where to, and how.

    ``copies`` are those of the state that are made later, of a save in the background; ``area`` is known to the
    coordinator alone, until it has told.
    """

    checkpointer: Checkpointer
    target: SaveTarget
    contents: CheckpointContents
    settings: Mapping[str, object]
    is_numbered: bool
    store: Store
    directory: str
    state: RankState
    copies: DeferredCopies | None
    area: StagingArea | None = None

    @property
    def plans_at_once(self) -> bool:
        """Whether files are planned before ``save`` returns: then what is wrong with what is saved is said by it.

        The thread plans those of a later save in the background, unless hooks are to run, shards to be gathered by the
        groups of the model, or some tensors to be copied at once.
        """
        return (
            self.copies is None
            or self.copies.uncloned
            or not self.target.planner.has_plan
            or self.changes_state
        )

    @property
    def adds_files(self) -> bool:
        """Whether hooks may write into the staging area."""
        return bool(self.checkpointer.hooks.save)

    @property
    def gathers(self) -> bool:
        """Whether machines share no file system, so that each needs all shards."""
        return len(self.target.group.ranks) < self.checkpointer.communicator.world_size

    @property
    def changes_state(self) -> bool:
        """Whether other tensors than were collected come into the state before files are planned."""
        return bool(self.checkpointer.hooks.save) or self.gathers

    def freeze(self) -> None:
        """Keep the state as it is now for the save that writes it in the background."""
        if self.copies is not None:
            self.copies.freeze(self.state)

    def stage(self, plan: SavePlan, tensors: dict[str, torch.Tensor]) -> StagedState:
        """Return what this rank will write. Of a save in the background only what is to be copied is kept of
        the state.
        """
        checkpointer, state, copies = self.checkpointer, self.state, self.copies
        group = self.target.group
        if copies is None:
            files = {file: TensorFile(plan.content(file, tensors)) for file in plan.mine}
        else:
            files = {file: TensorFile(plan.content(file, tensors, copies.part_of)) for file in plan.mine}
            files = checkpointer.background.stager.stage(files, copies)
            # The names here would keep clones, too.
            tensors.clear()
            copies.forget(state)
        documents = {rank_file(group.rank): canonical(state.own)}
        if group.is_coordinator:
            documents[STATE] = canonical(state.common)
            documents[TENSORS] = plan.index_content
        others = {**self.settings}
        saved = Saved(
            time=now(),
            world_size=checkpointer.runtime.world_size,
            ranks=group.ranks,
            parallel=str(others.pop("parallel", "")),
            settings=others,
            versions=versions(),
        )
        return StagedState(files, documents, saved, copies)


@dataclass
class StagedState:
    """What this rank writes: files of tensors, and others by name. ``copies`` of tensors are to be made before."""

    tensors: dict[str, TensorFile]
    documents: dict[str, bytes]
    saved: Saved
    copies: DeferredCopies | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the files, without the headers of those of tensors."""
        tensors = sum(tensor.nbytes for file in self.tensors.values() for tensor in file.tensors.values())
        return tensors + sum(map(len, self.documents.values()))


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
            # Training waits for nothing more: from here on, it comes first.
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
        """Return what lies in the staging area beside ``known`` files: hooks have made it.

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


def yield_to_training() -> None:
    """Let this thread, and those that it starts, run only when others leave a core free.

    They get a tenth of a busy core. With less, the next save would have to wait for this one.
    """
    # Not all systems have priorities of threads.
    with suppress(OSError, AttributeError):
        of_training = os.getpriority(os.PRIO_PROCESS, os.getpid())
        niceness = min(of_training + BACKGROUND_NICENESS, GREATEST_NICENESS)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def now() -> str:
    """Return the time in UTC, as ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


# What hooks see -----------------------------------------------------------------------------------


def run_hooks(
    hooks: Iterable[SaveHook],
    contents: CheckpointContents,
    weights: list[dict[str, object]],
    state: RankState,
    staging: str,
) -> None:
    """Hooks see whole weights, and what they leave of them is what is saved."""
    left = list(weights)
    with _as_whole_models(contents, weights):
        for hook in list(hooks):
            hook(list(contents.models), left, staging)
    for number, of_model in enumerate(weights):
        state.replace_model(number, of_model if any(of_model is kept for kept in left) else None)


@contextmanager
def _as_whole_models(contents: CheckpointContents, weights: list[dict[str, object]]) -> Iterator[None]:
    """Let ``state_dict`` of a model give the gathered weights inside of the block: one rank may save them alone."""
    with ExitStack() as handles:
        for model, gathered in zip(contents.models, weights, strict=True):
            handles.callback(model.register_state_dict_post_hook(partial(_show, dict(gathered))).remove)
        yield


def _show(gathered: dict[str, object], _: object, state: dict[str, object], prefix: str, *__: object) -> None:
    state.update({prefix + name: tensor for name, tensor in gathered.items() if prefix + name in state})


def refuse_url(writer: Writer) -> None:
    if not writer.store.is_local:
        raise UsageError(
            f"A hook that runs before save_state would write files into {writer.directory}, but that is a URL. "
            "Save to a local directory, or remove the hook."
        )
