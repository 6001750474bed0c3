"""What a run keeps from one save or load to the next: locks, hooks, the last plan, the thread that writes."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lockstep.checkpoint.contents import Hooks
from lockstep.checkpoint.deferred import DeferredCopies, HostStager
from lockstep.checkpoint.folders import CheckpointGroup, Folders
from lockstep.checkpoint.planner import SavePlanner
from lockstep.comm.collectives import Communicator
from lockstep.config.handlers import ProjectConfiguration
from lockstep.errors import CheckpointError
from lockstep.runtime.process import Runtime
from lockstep.runtime.step import StepState

logger = logging.getLogger("lockstep.checkpoint")


@dataclass(frozen=True)
class SaveTarget:
    """Where a save goes.

    Args:
        folders: They know where the next checkpoint is made: ``Folders``, or ``FoldersInMemory``.
        group: The ranks that write one checkpoint together.
        sharing: Of these, the ranks that see the folder in which this rank writes.
        planner: Makes the plans of the group.
        holds_all: Whether all that the group writes comes to lie in that folder.
    """

    folders: Any
    group: CheckpointGroup
    sharing: CheckpointGroup
    planner: SavePlanner
    holds_all: bool


class Checkpointer:
    """The checkpoints of one run; ``save`` and ``load`` are the functions that make and read them.

    ``committed`` is called on rank 0 with the directory of each checkpoint that has become complete, and whether it is
    one in memory, by the thread that wrote it.
    """

    def __init__(
        self,
        runtime: Runtime,
        communicator: Communicator,
        project: ProjectConfiguration,
        committed: Callable[[str, bool], None],
        step: StepState,
    ) -> None:
        self.runtime = runtime
        self.communicator = communicator
        self.project = project
        self.committed = committed
        self.hooks = Hooks()
        self.group = _group(runtime, project)
        self.folders = Folders(project, self.group, runtime.world_size)
        self.background = Background(step)
        self.memory: Any = None
        self.saves_in_memory = False
        self._memory_planner: SavePlanner | None = None
        self._gloo: Communicator | None = None

    @cached_property
    def planner(self) -> SavePlanner:
        """Of saves to the project's folders."""
        return SavePlanner(self.group)

    @property
    def on_disk(self) -> SaveTarget:
        """The project's folders."""
        return SaveTarget(self.folders, self.group, self.group, self.planner, True)

    def in_memory(self, memory: Any) -> SaveTarget:
        """Return the target of a save in memory. All ranks write one checkpoint, whatever machines share."""
        group = self.group
        # With save_on_each_node a group on disk is one machine; a plan of all ranks cannot be shared with it.
        if len(group.ranks) < self.runtime.world_size:
            group = CheckpointGroup(self.runtime.rank, list(range(self.runtime.world_size)))
            self._memory_planner = self._memory_planner or SavePlanner(group)
        planner = self._memory_planner or self.planner
        # With one or two machines each comes to hold everything: its own files, and copies of the other's.
        return SaveTarget(memory, group, memory.group, planner, len(memory.machines) <= 2)

    def is_in_memory(self, path: str) -> bool:
        """Return whether that is the path of a checkpoint in memory, which the next one there replaces."""
        return self.memory is not None and path.startswith(f"{self.memory.path}/")

    def alone(self) -> Checkpointer:
        """Return the checkpointer of a save by this rank alone, which has the whole state: it sends nothing and waits
        for none."""
        one = copy.copy(self)
        one.__dict__.pop("planner", None)
        one.communicator = Communicator(replace(self.runtime, world_size=1))
        one.group = CheckpointGroup(self.runtime.rank, [self.runtime.rank])
        one.folders = Folders(self.project, one.group, 1)
        one._gloo = None
        return one

    def gloo_communicator(self) -> Communicator:
        """Return the communicator of a group of its own, for what goes on while training uses the main one. Collective,
        once a run."""
        if self._gloo is None:
            self._gloo = self.communicator.with_gloo()
        return self._gloo

    def wait(self) -> None:
        """Wait for a save that runs in the background. Raises CheckpointError if it failed."""
        self.background.wait()

    def close(self) -> None:
        """Wait for a save in the background, and let other runs write this run's folder."""
        try:
            self.wait()
        finally:
            self.folders.close()


class Background:
    """At most one save at a time, in a thread of its own; the process does not end before it does.

    ``copies`` are those that it makes, which training waits for through ``step``.
    """

    def __init__(self, step: StepState) -> None:
        self._step = step
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._what = ""
        self.copies: DeferredCopies | None = None

    @cached_property
    def stager(self) -> HostStager:
        """Host memory for the copies."""
        return HostStager()

    def defer(self) -> DeferredCopies:
        """Return an empty list of copies of a state that are made later."""
        return DeferredCopies(self._step.clock)

    def start(self, work: Callable[[], None], what: str, copies: DeferredCopies) -> None:
        """Run ``work``, which saves ``what``; ``wait`` must have been called since the last start."""
        assert self._thread is None
        self._what = what
        may_begin = threading.Event()

        def run() -> None:
            # A new thread would hold the interpreter for as long as it may, while training waits for it.
            may_begin.wait()
            try:
                work()
            except BaseException as error:
                self._failure = error
                logger.error("%s was not saved: %s", what, error)
            finally:
                copies.end()

        thread = threading.Thread(target=run, name="lockstep-save", daemon=False)
        try:
            thread.start()
            self._step.being_saved = self.copies = copies
            self._thread = thread
        finally:
            # Also where a signal's handler raises: the thread waits for it.
            may_begin.set()

    def wait(self) -> None:
        """Wait for the running save, if there is one.

        Raises:
            CheckpointError: it failed, on this or another rank.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.copies is not None:
            self.copies.release()
            self._step.being_saved = self.copies = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(
                f"{self._what}, which was being saved in the background, was not saved: {failure}"
            ) from failure


def _group(runtime: Runtime, project: ProjectConfiguration) -> CheckpointGroup:
    """Return the ranks that share a directory: all, or those of this machine where machines share no file
    system.
    """
    ranks = range(runtime.world_size)
    # The ranks of a machine have consecutive numbers.
    if project.save_on_each_node:
        first = runtime.rank - runtime.local_rank
        ranks = range(first, first + runtime.local_world_size)
    return CheckpointGroup(runtime.rank, list(ranks))
