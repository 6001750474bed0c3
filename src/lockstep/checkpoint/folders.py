"""The folders of a run's checkpoints, and the ranks that share one: which is next, loaded or removed, and its lock.

Files that somebody puts into a checkpoint's folder after it was saved, such as a model's export, are no part of it:
loading passes over them. They are not lost with it either: what replaces the checkpoint takes them along, and where it
is removed they stay.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.checkpoint.format.documents import MANIFEST, OURS
from lockstep.checkpoint.store import store_for
from lockstep.checkpoint.store.base import REMOVED, REPLACED, STAGING, Lock, Store, UnreachableError
from lockstep.checkpoint.store.local import LocalStore
from lockstep.checkpoint.store.verify import is_published, read_manifest, root_of, verify_checkpoint
from lockstep.config.handlers import ProjectConfiguration
from lockstep.config.values import join_names
from lockstep.errors import ArgumentError, CheckpointError, LockstepError, UsageError

logger = logging.getLogger("lockstep.checkpoint")


ELSEWHERE = (
    "Make room there or mend its permissions, or save elsewhere; "
    "checkpoints that were saved before are untouched."
)


@dataclass(frozen=True)
class CheckpointGroup:
    """The ranks that write and read one directory together, and this one among them."""

    rank: int
    ranks: list[int]

    @property
    def coordinator(self) -> int:
        """The rank that does what one alone must do: it stages, publishes and removes."""
        return self.ranks[0]

    @property
    def is_coordinator(self) -> bool:
        return self.rank == self.coordinator

    @property
    def share(self) -> tuple[int, int]:
        """This rank's number among them, and how many they are."""
        return self.ranks.index(self.rank), len(self.ranks)

    def refuse_different(self, directories: list[str]) -> None:
        """Raise UsageError where this rank saves to another directory than the coordinator."""
        mine, first = directories[self.rank], directories[self.coordinator]
        if mine != first:
            raise UsageError(
                f"Rank {self.rank} saves to {mine}, but rank {self.coordinator} to {first}. Pass the same "
                "directory on every rank: all ranks write one checkpoint together."
            )


class StagingArea(NamedTuple):
    """Where a save writes. It ``replaces`` a checkpoint, or not; ``older`` ones are to be removed afterwards."""

    path: str
    replaces: bool
    older: list[str]


class Folders:
    """The folders of one run. ``group`` are the ranks that share a directory, ``damaged`` what was found not whole."""

    def __init__(self, project: ProjectConfiguration, group: CheckpointGroup, world_size: int) -> None:
        self._project = project
        self._group = group
        self._world_size = world_size
        self._locks: dict[str, Lock] = {}
        self._stores: dict[str, tuple[Store, str]] = {}
        self._local = LocalStore()
        self.damaged: set[str] = set()

    def next(self, output_dir: str | os.PathLike[str] | None) -> tuple[Store, str]:
        """Return where the next checkpoint goes."""
        store, path = self._store_and_folder(output_dir)
        if output_dir is None:
            # Raises where another run has taken one over.
            for lock in self._locks.values():
                lock.acquire()
        with explained(f"Rank {self._group.rank} cannot save to {path}", ELSEWHERE):
            return store, next_directory(None if output_dir is None else path, self._project, store)

    def begin(self, store: Store, directory: str, is_numbered: bool) -> StagingArea:
        """Lock ``directory`` and make an empty staging area for it."""
        with explained(f"Rank {self._group.rank} cannot write {directory}", ELSEWHERE):
            self._lock(store, directory, is_numbered)
            # Both are there where a process was killed before it had verified the newer one.
            if len(store.candidates(directory)) > 1:
                _keep_newest_whole(store, directory)
            if is_numbered:
                clear_unfinished(os.path.dirname(directory), store)
            path = store.begin(directory)
            replaces = store.exists(directory)
            return StagingArea(path, replaces, superfluous(directory, self._project, store, self.damaged))

    def candidates(self, input_dir: str | os.PathLike[str] | None) -> tuple[Store, list[str]]:
        """Return where a checkpoint may be that is loaded, best first; of the project, perhaps nowhere."""
        store, path = self._store_and_folder(input_dir)
        return store, candidates(None if input_dir is None else path, self._project, store)

    def next_number(self) -> int:
        """Return the number of the project's next checkpoint, once one has been loaded."""
        return number_after(self._project, self._store_and_folder(None)[0])

    def unlock(self, directory: str) -> None:
        """Let others write a directory that is not in a project's folder."""
        lock = self._locks.pop(f"{directory}.lock", None)
        if lock is not None:
            lock.release()

    def close(self) -> None:
        """Let other runs write this run's folder."""
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()

    def _store_and_folder(self, path: str | os.PathLike[str] | None) -> tuple[Store, str]:
        text = os.fspath(self._project.project_dir or "." if path is None else path)
        # A store may know which locks this run has taken.
        if text not in self._stores:
            store, place = store_for(text)
            # One for all local paths: it knows which folders have been brought to the disk.
            self._stores[text] = self._local if store.is_local else store, place
        store, place = self._stores[text]
        if not store.is_local and len(self._group.ranks) < self._world_size:
            raise UsageError(
                f"save_on_each_node=True saves one checkpoint on each machine, but {place} is one place for all "
                "of them. Leave save_on_each_node out."
            )
        return store, place

    def _lock(self, store: Store, directory: str, is_numbered: bool) -> None:
        """Lock a project's folder until the run ends, another directory until it has been saved."""
        folder = os.path.dirname(directory)
        path = f"{folder}/.lock" if is_numbered else f"{directory}.lock"
        lock = self._locks.setdefault(path, store.lock(path, folder if is_numbered else directory))
        lock.acquire()


@contextmanager
def explained(what: str | Callable[[], str], remedy: str) -> Iterator[None]:
    """Raise what a file system raises, which may be anything of a remote one, as CheckpointError."""
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what if isinstance(what, str) else what()}: {error}. {remedy}") from error


# Numbered checkpoints --------------------------------------------------------------------------------


def next_directory(output_dir: str | None, project: ProjectConfiguration, store: Store) -> str:
    """Return where ``save_state`` writes: the given directory, else the project's next numbered one.

    Raises:
        UsageError: neither a directory nor automatic naming, or there are later ones that this run has not loaded.
    """
    if output_dir is not None:
        return refuse_unfinished(output_dir)
    if not project.automatic_checkpoint_naming:
        raise UsageError(
            "save_state was called without a directory. Pass one, or ProjectConfiguration(project_dir=..., "
            "automatic_checkpoint_naming=True)."
        )
    folder = folder_of(project)
    there = numbers(folder, store)
    if there and there[-1] >= project.iteration:
        raise UsageError(
            f"{folder}/checkpoint_{there[-1]} exists already, and this run would save "
            f"checkpoint_{project.iteration} next, which is not a higher number. Call load_state first to go on "
            "with that run, or save to a project_dir of its own, or set ProjectConfiguration.iteration to "
            f"{there[-1] + 1} or more."
        )
    return f"{folder}/checkpoint_{project.iteration}"


def candidates(input_dir: str | None, project: ProjectConfiguration, store: Store) -> list[str]:
    """Return where ``load_state`` looks, best first: the given directory, or the numbered ones from the newest on."""
    if input_dir is not None:
        return store.candidates(input_dir)
    if not project.automatic_checkpoint_naming:
        raise ArgumentError(
            "load_state was called without a directory. Pass the one that save_state wrote, or "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
        )
    folder = folder_of(project)
    return [f"{folder}/checkpoint_{number}" for number in reversed(numbers(folder, store))]


def numbers(folder: str, store: Store) -> list[int]:
    """Return the numbers of the checkpoints ``checkpoint_<i>`` in ``folder``, ascending; others are
    ignored.
    """
    matches = (re.fullmatch(r"checkpoint_(0|[1-9]\d{0,17})", name) for name in store.children(folder))
    return sorted(int(match[1]) for match in matches if match)


def number_after(project: ProjectConfiguration, store: Store) -> int:
    """Return the number of the next checkpoint, once one has been loaded: above all that are there."""
    there = numbers(folder_of(project), store)
    return there[-1] + 1 if there else project.iteration


def superfluous(
    directory: str, project: ProjectConfiguration, store: Store, damaged: Collection[str] = ()
) -> list[str]:
    """Return the checkpoints beyond ``total_limit``, once ``directory`` is one of them: the ``damaged``,
    then the oldest.

    Numbered folders that no ``save_state`` wrote are not counted and stay.
    """
    if not project.automatic_checkpoint_naming or project.total_limit is None:
        return []
    folder = folder_of(project)
    # It is elsewhere, perhaps in another store.
    if directory.rpartition("/")[0] != folder:
        return []
    others = [f"{folder}/checkpoint_{number}" for number in numbers(folder, store)]
    others = [path for path in others if path != directory and is_published(store, path)]
    # Stable: the oldest of each kind first.
    others.sort(key=lambda path: path not in damaged)
    # One more, for the checkpoint that is being made.
    return others[: max(0, len(others) + 1 - project.total_limit)]


def remove_older(store: Store, directory: str, older: Collection[str], rank: int) -> None:
    """Remove what ``directory`` has replaced, and ``older`` checkpoints."""
    what = f"Rank {rank} has saved {directory}, but could not remove what is older"
    with explained(what, "Mend the permissions there: the next save removes it."):
        remove_replaced(store, directory)
        if older:
            prune(older, os.path.dirname(directory), store)


def prune(old: Collection[str], folder: str, store: Store) -> None:
    """Remove checkpoints, and what an earlier removal left in their folder; files that were added to them stay."""
    for directory in old:
        remove(store, directory)
    for name in store.children(folder):
        if re.fullmatch(rf"checkpoint_\d+{re.escape(REMOVED)}", name):
            store.abandon(f"{folder}/{name}")


def clear_unfinished(folder: str, store: Store) -> None:
    """Remove what saves and removals left in ``folder`` that did not come to their end; the caller holds its lock."""
    unfinished = rf"checkpoint_\d+({re.escape(STAGING)}|{re.escape(REMOVED)})"
    for name in store.children(folder):
        if re.fullmatch(unfinished, name):
            store.abandon(f"{folder}/{name}")


def folder_of(project: ProjectConfiguration) -> str:
    """Return the folder of a project's numbered checkpoints."""
    if project.project_dir is None:
        raise UsageError(
            "automatic_checkpoint_naming needs a place. Pass project_dir to ProjectConfiguration."
        )
    return f"{store_for(project.project_dir)[1]}/checkpoints"


def refuse_unfinished(directory: str) -> str:
    """Return ``directory``. Raises UsageError for a name that directories have while they are written or removed."""
    if directory.endswith((STAGING, REPLACED, REMOVED)):
        raise UsageError(
            f"{directory} has a suffix that unfinished checkpoints are given. Pass a directory with another name."
        )
    return directory


# Files that were added -------------------------------------------------------------------------------


def added_files(store: Store, directory: str) -> list[str]:
    """Return what lies in a published checkpoint and is not in its manifest, by relative name; links are not
    followed.

    Where the manifest is damaged, it is what has a name that no file of ours has.
    """
    try:
        manifest = read_manifest(store, directory)
        root, names = root_of(directory, manifest), manifest.files.keys()
    except UnreachableError:
        # No answer says nothing about the manifest: files of the checkpoint would be taken for added ones.
        raise
    except CheckpointError:
        root, names = directory, None
    try:
        found = store.files(root)
    except UnreachableError:
        raise
    except (OSError, CheckpointError):
        return []
    return sorted(
        name
        for name in found
        if name != MANIFEST and not (OURS.fullmatch(name) if names is None else name in names)
    )


def is_rest(store: Store, directory: str) -> bool:
    """Return whether a folder holds files, but none of a checkpoint's."""
    try:
        names = store.files(directory).keys()
    except (OSError, CheckpointError):
        return False
    return bool(names) and not any(name == MANIFEST or OURS.fullmatch(name) for name in names)


def remove(store: Store, directory: str) -> None:
    """Remove a checkpoint, but for files that were added to it, which stay where they are."""
    kept = added_files(store, directory)
    store.remove(directory, kept)
    if kept:
        logger.warning(
            "Removed the checkpoint %s, but kept %s, which was added to it. Remove that yourself when you no longer "
            "need it.",
            directory,
            join_names(kept),
        )


def remove_replaced(store: Store, directory: str) -> None:
    """Remove what a checkpoint has replaced; files that were added to that go on in its successor."""
    for older in store.candidates(directory):
        if older != directory:
            store.move_files(older, directory, added_files(store, older))
    store.remove_replaced(directory)


def withdraw(store: Store, directory: str) -> None:
    """Remove a checkpoint in favour of the one that it had replaced, which gets the files that were added to it."""
    for older in store.candidates(directory):
        if older != directory:
            store.move_files(directory, older, added_files(store, directory))
            break
    store.remove(directory)


def _keep_newest_whole(store: Store, directory: str) -> None:
    """Keep the newer one that is whole, of a checkpoint and the one that it replaced."""
    try:
        verify_checkpoint(store, directory)
    except UnreachableError:
        raise
    except CheckpointError:
        withdraw(store, directory)
    else:
        remove_replaced(store, directory)
