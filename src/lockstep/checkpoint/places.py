"""Where one run saves and loads: the places, their locks, and what is made ready there."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.checkpoint import added, retain
from lockstep.checkpoint.store.base import Lock, Store, UnreachableError
from lockstep.checkpoint.store.local import LocalStore
from lockstep.checkpoint.store.place import store_for
from lockstep.checkpoint.store.verify import verify
from lockstep.checkpoint.write import ELSEWHERE, Members, explained
from lockstep.comm.collectives import Communicator
from lockstep.comm.together import together
from lockstep.config.handlers import ProjectConfiguration
from lockstep.errors import CheckpointError, UsageError


@dataclass(frozen=True)
class Target:
    """Where one save goes. ``old`` are checkpoints to be removed afterwards."""

    store: Store
    directory: str
    staging: str
    replaces: bool
    old: list[str]

    def pruning(self) -> Callable[[], None] | None:
        """What removes ``old``, if there are any."""
        if not self.old:
            return None
        return lambda: retain.prune(self.old, os.path.dirname(self.directory), self.store)


class Places:
    """The places of one run. ``members`` are the ranks that share a directory, ``damaged`` what was found not whole."""

    def __init__(self, project: ProjectConfiguration, members: Members, communicator: Communicator) -> None:
        self._project = project
        self._members = members
        self._communicator = communicator
        self._locks: dict[str, Lock] = {}
        self._stores: dict[str, tuple[Store, str]] = {}
        self.damaged: set[str] = set()

    def open(self, output_dir: str | os.PathLike[str] | None) -> Target:
        """Lock the place and make an empty staging area there."""
        with together(self._communicator):
            store, path = self._place(output_dir)
            if output_dir is None:
                for lock in self._locks.values():  # of one that another run took over, this tells
                    lock.acquire()
            with explained(f"Rank {self._members.rank} cannot save to {path}", ELSEWHERE):
                directory = retain.next_directory(None if output_dir is None else path, self._project, store)
        directories = self._communicator.gather_object([directory])
        begun: tuple[str, bool, list[str]] = ("", False, [])
        try:
            with together(self._communicator):
                _refuse_different(directories, self._members)
                if self._members.is_first:
                    begun = self._begin(store, directory, is_numbered=output_dir is None)
        except BaseException:
            self.unlock(directory)
            raise
        staging, replaces, old = self._communicator.gather_object([begun])[self._members.ranks[0]]
        return Target(store, directory, staging, replaces, old)

    def _place(self, path: str | os.PathLike[str] | None) -> tuple[Store, str]:
        text = os.fspath(self._project.project_dir or "." if path is None else path)
        if text not in self._stores:  # a store may know which locks this run has taken
            self._stores[text] = store_for(text)
        store, place = self._stores[text]
        if not isinstance(store, LocalStore) and len(self._members.ranks) < self._communicator.world_size:
            raise UsageError(
                f"save_on_each_node=True saves one checkpoint on each machine, but {place} is one place for all of "
                "them. Leave it out."
            )
        return store, place

    def _begin(self, store: Store, directory: str, is_numbered: bool) -> tuple[str, bool, list[str]]:
        with explained(f"Rank {self._members.rank} cannot write {directory}", ELSEWHERE):
            self._lock(store, directory, is_numbered)
            # Both are there where a process was killed before it had verified the newer one.
            if len(store.candidates(directory)) > 1:
                _settle(store, directory)
            if is_numbered:
                retain.clear_unfinished(os.path.dirname(directory), store)
            staging = store.begin(directory)
            return (
                staging,
                store.exists(directory),
                retain.superfluous(directory, self._project, store, self.damaged),
            )

    def candidates(self, input_dir: str | os.PathLike[str] | None) -> tuple[Store, list[str]]:
        """Where a checkpoint may be that is loaded, best first; collective."""
        with together(self._communicator):
            store, path = self._place(input_dir)
            found = retain.candidates(None if input_dir is None else path, self._project, store)
        # What the first rank sees decides: file systems may show a new directory to some ranks later.
        return store, self._communicator.gather_object([found])[self._members.ranks[0]]

    def next_number(self) -> int:
        """The number of the project's next checkpoint; collective."""
        with together(self._communicator):
            return retain.number_after(self._project, self._place(None)[0])

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

    def _lock(self, store: Store, directory: str, is_numbered: bool) -> None:
        """Lock a project's folder until the run ends, another directory until it has been saved."""
        folder = os.path.dirname(directory)
        path = f"{folder}/.lock" if is_numbered else f"{directory}.lock"
        lock = self._locks.setdefault(path, store.lock(path, folder if is_numbered else directory))
        lock.acquire()


def _refuse_different(directories: list[str], members: Members) -> None:
    mine, first = directories[members.rank], directories[members.ranks[0]]
    if mine != first:
        raise UsageError(
            f"Rank {members.rank} saves to {mine}, but rank {members.ranks[0]} to {first}. Pass the same directory on "
            "every rank: all of them write it together."
        )


def _settle(store: Store, directory: str) -> None:
    """Of a checkpoint and the one that it replaced, keep the newer that is whole."""
    try:
        verify(store, directory)
    except UnreachableError:
        raise
    except CheckpointError:
        added.withdraw(store, directory)
    else:
        added.settle(store, directory)
