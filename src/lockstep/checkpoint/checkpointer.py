"""Saves and loads states of one run: the order of steps, in which all ranks act together."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint import retain
from lockstep.checkpoint.background import Background
from lockstep.checkpoint.format.documents import STATE, TENSORS, Saved, canonical, rank_file
from lockstep.checkpoint.format.tensorfile import TensorFile
from lockstep.checkpoint.format.versions import versions
from lockstep.checkpoint.plan import Plan, Planner
from lockstep.checkpoint.read import Checkpoint
from lockstep.checkpoint.restore import plan_restoration
from lockstep.checkpoint.state import Collected, collect, digests_of, part_ways
from lockstep.checkpoint.store.local import LocalStore, Lock, Store
from lockstep.checkpoint.store.place import UnreachableError, store_for
from lockstep.checkpoint.training import Hooks, Training
from lockstep.checkpoint.verify import verify
from lockstep.checkpoint.write import Members, Snapshot, Transaction, now
from lockstep.comm.collectives import Communicator
from lockstep.comm.dtensor import local, whole
from lockstep.comm.together import together
from lockstep.config.handlers import ProjectConfiguration
from lockstep.errors import CheckpointError, LockstepError, UsageError
from lockstep.runtime.process import Runtime

logger = logging.getLogger("lockstep.checkpoint")


@dataclass(frozen=True)
class Target:
    """Where one save goes. ``old`` are checkpoints to be removed afterwards."""

    store: Store
    directory: str
    staging: str
    replaces: bool
    old: list[str]


class Checkpointer:
    """The checkpoints of one run. Its methods are collective: every rank calls them, and all raise alike."""

    def __init__(self, runtime: Runtime, communicator: Communicator, project: ProjectConfiguration) -> None:
        self.hooks = Hooks()
        self._runtime = runtime
        self._communicator = communicator
        self._project = project
        self._planner = Planner()
        self._background = Background(runtime)
        self._locks: dict[str, Lock] = {}
        self._stores: dict[str, tuple[Store, str]] = {}

    @property
    def _members(self) -> Members:
        """The ranks that share a directory: all, or those of this machine where machines share no file system."""
        runtime = self._runtime
        ranks = range(runtime.world_size)
        if self._project.save_on_each_node:
            first = runtime.rank - runtime.local_rank
            ranks = range(first, first + runtime.local_world_size)
        return Members(runtime.rank, list(ranks))

    def wait(self) -> None:
        """Wait for a save that runs in the background. Raises CheckpointError if it failed."""
        self._background.wait()

    def close(self) -> None:
        """``wait``, and let other runs write this run's folder."""
        try:
            self.wait()
        finally:
            for lock in self._locks.values():
                lock.release()
            self._locks.clear()

    # Save -------------------------------------------------------------------------------------------

    def save(
        self,
        output_dir: str | os.PathLike[str] | None,
        training: Training,
        described: Mapping[str, Any],
        blocking: bool = True,
    ) -> str:
        """Write ``training`` as a checkpoint and return its directory.

        Not ``blocking``: returns when this rank's part has been copied in host memory; a failure after that is
        raised by the next call. ``described`` says how the run is set up.
        """
        self.wait()
        target = self._open(output_dir)
        members = self._members
        try:
            snapshot = self._snapshot(training, members, target, described)
            communicator = self._communicator
            if not blocking:
                with together(self._communicator):
                    snapshot.tensors = self._background.copies.take(snapshot.tensors)
                communicator = self._background.communicator()
        except BaseException:
            if members.is_first:
                target.store.abandon(target.staging)
                self._unlock(target.directory)
            raise
        transaction = Transaction(target.store, target.directory, target.staging, members, communicator)
        self._project.iteration += output_dir is None

        def write() -> None:
            try:
                transaction.run(snapshot, target.replaces, self._pruning(target))
            finally:
                self._unlock(target.directory)

        if not blocking:
            self._background.start(write, target.directory)
            return target.directory
        try:
            write()
        except BaseException:
            self._project.iteration -= output_dir is None
            raise
        return target.directory

    def _open(self, output_dir: str | os.PathLike[str] | None) -> Target:
        """Lock the place and make an empty staging area there."""
        with together(self._communicator):
            store, path = self._place(output_dir)
            if output_dir is None:
                for lock in self._locks.values():  # of one that another run took over, this tells
                    lock.acquire()
            directory = retain.next_directory(None if output_dir is None else path, self._project, store)
        members = self._members
        directories = self._communicator.gather_object([directory])
        begun: tuple[str, bool, list[str]] = ("", False, [])
        try:
            with together(self._communicator):
                _refuse_different(directories, members)
                if members.is_first:
                    begun = self._begin(store, directory, is_numbered=output_dir is None)
        except BaseException:
            self._unlock(directory)
            raise
        staging, replaces, old = self._communicator.gather_object([begun])[members.ranks[0]]
        return Target(store, directory, staging, replaces, old)

    def _place(self, path: str | os.PathLike[str] | None) -> tuple[Store, str]:
        text = os.fspath(self._project.project_dir or "." if path is None else path)
        if text not in self._stores:  # a store may know which locks this run has taken
            self._stores[text] = store_for(text)
        store, place = self._stores[text]
        if not isinstance(store, LocalStore) and len(self._members.ranks) < self._runtime.world_size:
            raise UsageError(
                f"save_on_each_node=True saves one checkpoint on each machine, but {place} is one place for all of "
                "them. Leave it out."
            )
        return store, place

    def _begin(self, store: Store, directory: str, is_numbered: bool) -> tuple[str, bool, list[str]]:
        try:
            self._lock(store, directory, is_numbered)
            if (
                len(store.candidates(directory)) > 1
            ):  # a process was killed before it had verified the newer one
                _settle(store, directory)
            staging = store.begin(directory)
            return staging, store.exists(directory), retain.superfluous(directory, self._project, store)
        except OSError as error:
            raise CheckpointError(
                f"{directory} cannot be written: {error}. Mend its permissions or make room there, or save elsewhere."
            ) from error

    def _snapshot(
        self, training: Training, members: Members, target: Target, described: Mapping[str, Any]
    ) -> Snapshot:
        """What this rank will write; tensors are not copied."""
        world_size = self._runtime.world_size
        with together(self._communicator):
            collected = collect(training, members.rank)
            mine = digests_of(collected) if world_size > 1 else {}
        digests = self._communicator.gather_object([mine])
        part_ways(collected, digests, members.rank, members.ranks[0])
        if self.hooks.save:
            self._run_save_hooks(training, collected, target.staging)
        tensors = collected.tensors
        if self._project.save_on_each_node and world_size > self._runtime.local_world_size:
            tensors = whole(tensors, keep=members.is_first)
            tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        tensors = {**tensors, **(collected.of_first if members.is_first else {}), **collected.of_rank}
        plan = self._planner.plan(tensors, members.rank, members.ranks, self._communicator)
        with together(self._communicator):
            self._check_room(plan, target, members)
            return self._files(plan, tensors, collected, members, described)

    def _run_save_hooks(self, training: Training, collected: Collected, staging: str) -> None:
        """Hooks see whole weights, and what they leave of them is what is saved."""
        with together(self._communicator):
            states: list[dict[str, Any]] = [model.state_dict() for model in training.models]
        weights: list[dict[str, Any]] = whole(states)
        left = list(weights)
        with together(self._communicator):
            for hook in list(self.hooks.save.values()):
                hook(list(training.models), left, staging)
            for number, state in enumerate(weights):
                collected.replace_model(number, state if any(state is kept for kept in left) else None)

    def _files(
        self,
        plan: Plan,
        tensors: Mapping[str, torch.Tensor],
        collected: Collected,
        members: Members,
        described: Mapping[str, Any],
    ) -> Snapshot:
        files = {
            file: TensorFile({key: local(tensors[name]) for key, name in keys.items()})
            for file, keys in plan.mine.items()
        }
        documents = {rank_file(members.rank): canonical(collected.own)}
        if members.is_first:
            documents[STATE] = canonical(collected.state)
            documents[TENSORS] = plan.index_content
        settings = {**described}
        saved = Saved(
            time=now(),
            world_size=self._runtime.world_size,
            ranks=members.ranks,
            parallel=str(settings.pop("parallel", "")),
            settings=settings,
            versions=versions(),
        )
        return Snapshot(files, documents, saved)

    def _check_room(self, plan: Plan, target: Target, members: Members) -> None:
        free = target.store.free_bytes(target.directory) if members.is_first else None
        needed = plan.nbytes
        if free is not None and free < needed:
            raise CheckpointError(
                f"{target.directory} needs {needed} bytes, but {free} are free there. Make room or save elsewhere; "
                "checkpoints that were saved before are untouched."
            )

    def _pruning(self, target: Target) -> Any:
        if not target.old:
            return None
        return lambda: retain.prune(target.old, os.path.dirname(target.directory), target.store)

    # Locks ------------------------------------------------------------------------------------------

    def _lock(self, store: Store, directory: str, is_numbered: bool) -> None:
        """Lock a project's folder until the run ends, another directory until it has been saved."""
        folder = os.path.dirname(directory)
        path = f"{folder}/.lock" if is_numbered else f"{directory}.lock"
        lock = self._locks.setdefault(path, store.lock(path, folder if is_numbered else directory))
        lock.acquire()

    def _unlock(self, directory: str) -> None:
        lock = self._locks.pop(f"{directory}.lock", None)
        if lock is not None:
            lock.release()

    # Load -------------------------------------------------------------------------------------------

    def load(self, input_dir: str | os.PathLike[str] | None, training: Training) -> str:
        """Restore the newest checkpoint that is whole, or the given one, and return its directory.

        All ranks look at everything before anything is changed.
        """
        self.wait()
        with together(self._communicator):
            store, path = self._place(input_dir)
            places = retain.candidates(None if input_dir is None else path, self._project, store)
        # What rank 0 sees decides: file systems may show a new directory to some ranks later.
        places = self._communicator.gather_object([places])[self._members.ranks[0]]
        with ExitStack() as copies:
            directory, folder = self._first_that_verifies(store, places, copies)
            self._restore(folder, training)
        if self._project.automatic_checkpoint_naming:
            with together(self._communicator):
                self._project.iteration = retain.number_after(self._project, self._place(None)[0])
        return directory

    def _first_that_verifies(self, store: Store, places: list[str], copies: ExitStack) -> tuple[str, str]:
        """The first whole checkpoint, and a local folder with it that ``copies`` removes.

        Raises what is wrong with the first one if there is none, and where a place does not answer: an older
        checkpoint is no answer to that.
        """
        first_failure: Exception | None = None
        for directory in places:
            try:
                folder = copies.enter_context(self._verified(store, directory))
            except LockstepError as error:
                if any(self._communicator.gather_object([isinstance(error, UnreachableError)])):
                    raise
                first_failure = first_failure or error
                if len(places) > 1 and self._members.is_first:
                    logger.warning("Skipped %s: %s", directory, error)
                continue
            if first_failure is not None and self._members.is_first:
                logger.warning("Loading %s instead.", directory)
            return directory, folder
        assert first_failure is not None
        raise first_failure

    @contextmanager
    def _verified(self, store: Store, directory: str) -> Iterator[str]:
        """A local folder with a whole checkpoint; stores that have to copy it verify it meanwhile."""
        share = self._members.share
        if isinstance(store, LocalStore):
            with together(self._communicator):
                verify(store, directory, share)
        with store.local_copy(directory, share, self._communicator) as folder:
            yield folder

    def _restore(self, directory: str, training: Training) -> None:
        with together(self._communicator):
            checkpoint = Checkpoint(directory)
            models: list[nn.Module] = list(training.models)
            for hook in list(self.hooks.load.values()):
                hook(models, checkpoint.root)
            restoration = plan_restoration(
                checkpoint, training, models, self._runtime.rank, self._runtime.world_size
            )
        with together(self._communicator):
            restoration.apply()
        restoration.open_window()
        if restoration.left and self._members.is_first:
            logger.warning(
                "%s was imported and holds no %s: left as is.", directory, " and ".join(restoration.left)
            )


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
        store.remove(directory)
    else:
        store.settle(directory)
