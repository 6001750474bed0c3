"""Saves and loads states of one run: the order of steps, in which all ranks act together."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.added import added_files
from lockstep.checkpoint.background import Background
from lockstep.checkpoint.format.documents import STATE, TENSORS, Saved, rank_file
from lockstep.checkpoint.format.json_text import canonical
from lockstep.checkpoint.format.tensorfile import TensorFile
from lockstep.checkpoint.format.versions import versions
from lockstep.checkpoint.places import Places, Target
from lockstep.checkpoint.plan import SavePlan, SavePlanner
from lockstep.checkpoint.read import Checkpoint
from lockstep.checkpoint.restore import plan_restoration
from lockstep.checkpoint.state import RankState, collect, digests_of, split_divergent_state
from lockstep.checkpoint.store.base import Store, UnreachableError
from lockstep.checkpoint.store.local import LocalStore
from lockstep.checkpoint.store.verify import verify
from lockstep.checkpoint.training import CheckpointContents, Hooks
from lockstep.checkpoint.union import gather_documents, joined_names, joined_state, names_here, refuse_untold
from lockstep.checkpoint.write import Members, Snapshot, Transaction, now
from lockstep.comm.collectives import Communicator
from lockstep.comm.dtensor import whole
from lockstep.comm.together import together
from lockstep.config.handlers import ProjectConfiguration
from lockstep.config.values import listed
from lockstep.errors import CheckpointError, LockstepError, NoCheckpointError, UsageError
from lockstep.runtime.process import Runtime

logger = logging.getLogger("lockstep.checkpoint")


class Checkpointer:
    """The checkpoints of one run. Its methods are collective: every rank calls them, and all raise alike.

    ``committed`` is called on rank 0 with the directory of each checkpoint that has become complete, by the thread
    that wrote it.
    """

    def __init__(
        self,
        runtime: Runtime,
        communicator: Communicator,
        project: ProjectConfiguration,
        committed: Callable[[str], None],
    ) -> None:
        self._committed = committed
        self.hooks = Hooks()
        self._runtime = runtime
        self._communicator = communicator
        self._project = project
        self._planner = SavePlanner()
        self._background = Background(runtime)
        self._members = _members(runtime, project)
        self._places = Places(project, self._members, communicator)
        self._has_told_of_added = False

    def wait(self) -> None:
        """Wait for a save that runs in the background. Raises CheckpointError if it failed."""
        self._background.wait()

    def close(self) -> None:
        """``wait``, and let other runs write this run's folder."""
        try:
            self.wait()
        finally:
            self._places.close()

    # Save -------------------------------------------------------------------------------------------

    def save(
        self,
        output_dir: str | os.PathLike[str] | None,
        training: CheckpointContents,
        described: Mapping[str, Any],
        blocking: bool = True,
    ) -> str:
        """Write ``training`` as a checkpoint and return its directory.

        Not ``blocking``: returns when this rank's part has been copied in host memory; a failure after that is
        raised by the next call. ``described`` says how the run is set up.
        """
        self.wait()
        if len(set(self._communicator.gather_object([bool(blocking)]))) > 1:
            raise UsageError("The ranks differ in blocking. Pass the same to save_state on every rank.")
        target = self._places.open(output_dir)
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
                self._places.unlock(target.directory)
            raise
        transaction = Transaction(target.store, target.directory, target.staging, members, communicator)
        self._project.iteration += output_dir is None

        def write() -> None:
            try:
                transaction.run(snapshot, target.replaces, target.pruning())
            finally:
                self._places.unlock(target.directory)
            if self._runtime.is_main:
                self._committed(target.directory)

        if not blocking:
            self._background.start(write, target.directory)
            return target.directory
        write()  # if it fails after it has published, the number is taken
        return target.directory

    def _snapshot(
        self, training: CheckpointContents, members: Members, target: Target, described: Mapping[str, Any]
    ) -> Snapshot:
        """What this rank will write; tensors are not copied."""
        world_size = self._runtime.world_size
        with together(self._communicator):
            collected = collect(training, members.rank)
            mine = digests_of(collected) if world_size > 1 else {}
        told = self._communicator.gather_object([(collected.state["contents"], mine)])
        _refuse_other_contents([contents for contents, _ in told])
        split_divergent_state(collected, [digests for _, digests in told], members.rank, members.ranks)
        if self.hooks.save:
            _refuse_url(target)
            self._run_save_hooks(training, collected, target.staging)
        tensors = collected.tensors
        if self._project.save_on_each_node and world_size > self._runtime.local_world_size:
            tensors = whole(tensors, keep=members.is_first)
            tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        collected.state = self._joined_state(collected, training)
        tensors = {**tensors, **collected.of_first, **collected.of_rank}
        plan = self._planner.plan(
            tensors, members.rank, members.ranks, self._communicator, own=collected.of_first.keys()
        )
        with together(self._communicator):
            if not self.hooks.save:
                refuse_untold(training, collected.state, plan.index)
            self._check_room(plan, target, members)
            return self._files(plan, tensors, collected, members, described)

    def _joined_state(self, collected: RankState, training: CheckpointContents) -> dict[str, Any]:
        """What is common to all ranks that share a directory, also where each has other blocks of a model."""
        with together(self._communicator):
            canonical(collected.state)  # raises where it is too deep
        documents = gather_documents(collected.state, self._communicator)
        with together(self._communicator):
            ranks = self._members.ranks
            if training.whole and len(ranks) < len(documents):
                raise UsageError(
                    f"save_on_each_node=True saves what the {len(ranks)} ranks of a machine have, but the stages of a "
                    "pipeline may be on other machines. Leave it out, and save to a file system that all of them share."
                )
            return joined_state([documents[rank] for rank in ranks], training)

    def _run_save_hooks(self, training: CheckpointContents, collected: RankState, staging: str) -> None:
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
        plan: SavePlan,
        tensors: Mapping[str, torch.Tensor],
        collected: RankState,
        members: Members,
        described: Mapping[str, Any],
    ) -> Snapshot:
        files = {file: TensorFile(plan.content(file, tensors)) for file in plan.mine}
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

    def _check_room(self, plan: SavePlan, target: Target, members: Members) -> None:
        free = target.store.free_bytes(target.directory) if members.is_first else None
        needed = plan.nbytes
        if free is not None and free < needed:
            raise CheckpointError(
                f"{target.directory} needs {needed} bytes, but {free} are free there. Make room or save elsewhere; "
                "checkpoints that were saved before are untouched."
            )

    # Load -------------------------------------------------------------------------------------------

    def load(self, input_dir: str | os.PathLike[str] | None, training: CheckpointContents) -> str:
        """Restore the newest checkpoint that is whole, or the given one, and return its directory.

        All ranks look at everything before anything is changed.
        """
        self.wait()
        store, places = self._places.candidates(input_dir)
        with ExitStack() as copies:
            directory, folder = self._first_that_verifies(store, places, copies)
            self._restore(folder, training)
        if self._project.automatic_checkpoint_naming:
            self._project.iteration = self._places.next_number()
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
                self._places.damaged.add(directory)
                if first_failure is None or isinstance(first_failure, NoCheckpointError):
                    first_failure = error
                if len(places) > 1 and self._members.is_first:
                    logger.warning("Skipped %s: %s", directory, error)
                continue
            self._tell_of_added(store, directory)
            if first_failure is not None and self._members.is_first:
                logger.warning("Loading %s instead.", directory)
            return directory, folder
        assert first_failure is not None
        raise first_failure

    def _tell_of_added(self, store: Store, directory: str) -> None:
        """Say, once a run, that files were put into a checkpoint which are no part of it."""
        # In other stores files of a checkpoint lie in a folder of their own.
        if not self._members.is_first or self._has_told_of_added or not isinstance(store, LocalStore):
            return
        names = added_files(store, directory)
        if names:
            self._has_told_of_added = True
            logger.warning(
                "%s holds %s, which was added after it was saved: passed over. All that was saved is there, unchanged.",
                directory,
                listed(names),
            )

    @contextmanager
    def _verified(self, store: Store, directory: str) -> Iterator[str]:
        """A local folder with a whole checkpoint; stores that have to copy it verify it meanwhile."""
        share = self._members.share
        if isinstance(store, LocalStore):
            with together(self._communicator):
                verify(store, directory, share)
        with store.local_copy(directory, share, self._communicator) as folder:
            yield folder

    def _restore(self, directory: str, training: CheckpointContents) -> None:
        with together(self._communicator):
            checkpoint = Checkpoint(directory)
            models: list[nn.Module] = list(training.models)
            for hook in list(self.hooks.load.values()):
                hook(models, checkpoint.root)
        with together(self._communicator):
            mine = names_here(training)
        everywhere = joined_names(gather_documents(mine, self._communicator))
        with together(self._communicator):
            restoration = plan_restoration(
                checkpoint, training, models, self._runtime.rank, self._runtime.world_size, everywhere
            )
        with together(self._communicator):
            restoration.apply()
        restoration.open_window()
        if restoration.left and self._members.is_first:
            logger.warning(
                "%s was imported and holds no %s: left as is.", directory, " and ".join(restoration.left)
            )


def _refuse_other_contents(contents: list[dict[str, int]]) -> None:
    """Raise UsageError, on every rank, where ranks have prepared or registered different numbers of objects."""
    other = next((r for r, held in enumerate(contents) if held != contents[0]), None)
    if other is not None:
        raise UsageError(
            f"Rank 0 saves {contents[0]}, but rank {other} {contents[other]}. Prepare and register the same objects in "
            "the same order on every rank."
        )


def _refuse_url(target: Target) -> None:
    if not isinstance(target.store, LocalStore):
        raise UsageError(
            f"A hook is registered that runs before save_state, and would write files into {target.directory}, "
            "which is a URL. Save to a local directory, or remove the hook."
        )


def _members(runtime: Runtime, project: ProjectConfiguration) -> Members:
    """The ranks that share a directory: all, or those of this machine where machines share no file system."""
    ranks = range(runtime.world_size)
    if project.save_on_each_node:
        first = runtime.rank - runtime.local_rank
        ranks = range(first, first + runtime.local_world_size)
    return Members(runtime.rank, list(ranks))
