"""Save the state of a run: what the ranks tell each other, step by step.

Every collective of a save stands in this file, in its order, below a comment that says what travels from which ranks
to which. Everything that is called in between plans, names or touches files, and holds none. These are used:

    raise_on_all_ranks   a block that may fail on one rank alone; at its end each rank tells all whether it has failed,
                         so that none goes on to a collective in which the others will not come
    gather_alike         each rank sends a value to all; where all send the same, a digest of it is all that travels
    gather_object        each rank sends a value to all, and has a list of what they sent, by rank
    whole                the shards of tensors are sent to all, or to the coordinator, where a hook wants whole tensors

The first save in the background also makes the process group of its thread.

``save`` is what is done at once, ``write_checkpoint`` what a thread may do while training goes on, in a process group
of its own (for a save in memory it is ``write_in_memory``); where nothing speaks against it
(``SaveRequest.plans_at_once``), the thread does ``plan_files`` too. A checkpoint is there once the coordinator has
published it, by one rename or one put; until then nothing that was saved before is touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack

from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.contents import CheckpointContents
from lockstep.checkpoint.folders import Folders, StagingArea, remove_older
from lockstep.checkpoint.format.documents import canonical, digest_of
from lockstep.checkpoint.global_state import (
    digests_of,
    first_ranks,
    merge_states,
    refuse_missing_tensors,
    refuse_other_contents,
    split_divergent_state,
)
from lockstep.checkpoint.planner import LocalShards
from lockstep.checkpoint.state import collect, collect_random
from lockstep.checkpoint.writer import SaveRequest, StagedState, Writer, refuse_url, run_hooks
from lockstep.comm.collectives import Communicator, raise_on_all_ranks
from lockstep.comm.dtensor import whole
from lockstep.errors import UsageError


def save_checkpoint(
    checkpointer: Checkpointer,
    output_dir: str | os.PathLike[str] | None,
    list_contents: Callable[[], CheckpointContents],
    settings: Mapping[str, object],
    blocking: bool = True,
    in_memory: bool = False,
) -> str:
    """Write a checkpoint and return its directory. Every rank calls it, and all raise alike.

    Args:
        checkpointer: What the run keeps between saves.
        output_dir: Where, or None for the project's next numbered directory.
        list_contents: What is saved, looked at when it is called.
        settings: How the run is set up, for the manifest.
        blocking: False: return as soon as what is saved is sure to be the state of now; a failure after that is
            raised by the next call.
        in_memory: Write to the memory of the machines, of which each keeps a copy of another one's part.
    """
    communicator, background = checkpointer.communicator, checkpointer.background
    checkpointer.wait()
    target = checkpointer.on_disk
    if in_memory:
        # Here, as few runs need it.
        from lockstep.checkpoint.in_memory import begin_saving, write_in_memory

        target = checkpointer.in_memory(begin_saving(checkpointer))
    folders = target.folders

    def request() -> SaveRequest:
        contents = list_contents()
        store, directory = folders.next(output_dir)
        state = collect(contents, target.group.rank)
        copies = None if blocking else background.defer()
        is_numbered = output_dir is None and not in_memory
        called = SaveRequest(
            checkpointer, target, contents, settings, is_numbered, store, directory, state, copies
        )
        if not called.changes_state:
            called.freeze()
        return called

    # From each rank to all: whether it can save, and a digest of how it was called, where it saves to, what it has
    # prepared and whether files are planned at once; where ranks differ, that itself.
    requested, failure = _attempt(request)
    mine = (
        None
        if requested is None
        else (bool(blocking), requested.directory, requested.state.common["contents"])
    )
    everywhere = communicator.gather_alike((mine, requested is None or requested.plans_at_once), failure)
    assert requested is not None
    called = [of_rank for of_rank, _ in everywhere]
    plans_at_once = any(at_once for _, at_once in everywhere)
    directory, copies = requested.directory, requested.copies

    with ExitStack() as undo:
        if copies is not None:
            undo.callback(copies.release)
        if len({blocks for blocks, _, _ in called}) > 1:
            raise UsageError(
                "The ranks called save_state with different values of blocking. Pass the same value on every rank."
            )
        refuse_other_contents([contents for _, _, contents in called])
        undo.callback(folders.unlock, directory)

        # From each rank to all: whether they save to one directory, and the coordinator could lock it.
        with raise_on_all_ranks(communicator):
            target.sharing.refuse_different([of_rank for _, of_rank, _ in called])
            if target.sharing.is_coordinator:
                requested.area = folders.begin(requested.store, directory, requested.is_numbered)
                undo.callback(Writer(requested.store, directory, requested.area.path, target.sharing).abandon)

        # Once a run: all make a group for the thread, and for files.
        writes_by = communicator if blocking and not in_memory else checkpointer.gloo_communicator()

        planned = plan_files(communicator, requested) if plans_at_once else None
        undo.pop_all()

    # Now: if writing fails after it has published, the number is taken.
    checkpointer.project.iteration += requested.is_numbered

    def write() -> None:
        try:
            writer, staged, area = planned or plan_files(writes_by, requested)
            if isinstance(folders, Folders):
                write_checkpoint(writes_by, writer, staged, area.replaces, area.older)
            else:
                write_in_memory(writes_by, writer, staged, folders, requested.adds_files)
        finally:
            folders.unlock(directory)
        if checkpointer.runtime.rank == 0:
            checkpointer.committed(directory, in_memory)

    if copies is None:
        write()
    else:
        background.start(write, directory, copies)
    return directory


def _attempt(request: Callable[[], SaveRequest]) -> tuple[SaveRequest | None, Exception | None]:
    try:
        return request(), None
    except Exception as error:
        return None, error


def plan_files(communicator: Communicator, request: SaveRequest) -> tuple[Writer, StagedState, StagingArea]:
    """Plan who writes which part of the state into which files. Collective.

    Returns this rank's part in it, what it writes, and where; nothing is left of the staging area if this raises.
    """
    checkpointer, contents, state = request.checkpointer, request.contents, request.state
    group, planner, rank = request.target.group, request.target.planner, request.target.group.rank
    sharing = request.target.sharing

    # From the coordinator to the ranks that share the directory: its staging area.
    area: StagingArea = communicator.gather_object([request.area])[sharing.coordinator]
    writer = Writer(request.store, request.directory, area.path, sharing)
    with ExitStack() as undo:
        undo.callback(writer.abandon)

        # From each rank to all: digests of buffers and objects of which copies may differ.
        with raise_on_all_ranks(communicator):
            digests = digests_of(state) if communicator.world_size > 1 else {}
        split_divergent_state(state, communicator.gather_object([digests]), rank, group.ranks)

        # Where a hook wants to see them: every shard of the weights, to all ranks of its mesh; tensor after tensor.
        if checkpointer.hooks.save:
            with raise_on_all_ranks(communicator):
                refuse_url(writer)
                shards = [model.state_dict() for model in contents.models]
            weights = whole(shards)
            with raise_on_all_ranks(communicator):
                run_hooks(checkpointer.hooks.save.values(), contents, weights, state, area.path)
                # A hook that builds a model draws its weights.
                collect_random(state, rank)

        # Where machines share no file system: every shard of everything, to all ranks of its mesh.
        if request.gathers:
            gathered = whole(state.tensors, keep=group.is_coordinator)
            state.tensors = {name: tensor for name, tensor in gathered.items() if tensor is not None}

        if request.changes_state:
            request.freeze()

        # From each rank to all: the digest of its state.json. Where they differ, as ranks have other blocks of a model,
        # then each such document, from the first rank that has it to all.
        with raise_on_all_ranks(communicator):
            digest = digest_of(canonical(state.common))
        firsts = first_ranks(communicator.gather_object([digest]))
        documents = [state.common] * len(firsts)
        if any(firsts):
            sent = communicator.gather_object([state.common if firsts[rank] == rank else None])
            documents = [sent[first] for first in firsts]

        # From each rank to all: a digest of what its tensors look like. Where one is not that of the last save, then
        # its local plan, so that all make the same global plan.
        tensors = {**state.tensors, **state.of_first, **state.of_rank}
        signatures = communicator.gather_object([planner.signature(tensors, own=state.of_first)])
        local_plans: list[list[LocalShards]] | None = None
        if planner.is_outdated(signatures):
            with raise_on_all_ranks(communicator):
                local_plan = planner.create_local_plan(tensors, own=state.of_first)
            local_plans = communicator.gather_object([local_plan])

        # From each rank to all: whether it can write its part of that plan, and has memory for a copy.
        with raise_on_all_ranks(communicator):
            state.common = merge_states(documents, group.ranks, contents)
            if local_plans is not None:
                planner.create_global_plan(local_plans, signatures)
            plan = planner.plan
            if not checkpointer.hooks.save:
                refuse_missing_tensors(contents, state.common, plan.index)
            if request.target.holds_all:
                writer.check_room(plan.nbytes)
            staged = request.stage(plan, tensors)
        undo.pop_all()
    return writer, staged, area


def write_checkpoint(
    communicator: Communicator,
    writer: Writer,
    staged: StagedState,
    replaces: bool = False,
    older: Collection[str] = (),
) -> None:
    """Write files and publish them; where that is to remove older checkpoints, verify first. Collective.

    Args:
        communicator: Of all ranks, also where only some share the directory.
        writer: This rank's part in it.
        staged: What this rank writes.
        replaces: Whether the directory is there already.
        older: Checkpoints that are removed then.

    Raises:
        LockstepError: a rank failed; what was published before is untouched, unless removing was all that failed.
    """
    try:
        # From each rank to all: whether it has written its files; then their sizes and digests, for the manifest.
        with raise_on_all_ranks(communicator):
            mine = writer.write_data(staged)
        written = communicator.gather_object([mine])

        # From each rank to all: whether the coordinator has published them.
        with raise_on_all_ranks(communicator):
            if writer.group.is_coordinator:
                writer.publish(staged.saved, written)
    except BaseException:
        writer.abandon()
        raise
    if not replaces and not older:
        return

    # From each rank to all: whether its share of the files is read back as it was written.
    with raise_on_all_ranks(communicator):
        writer.verify()

    # From each rank to all: whether the coordinator has removed what is older.
    with raise_on_all_ranks(communicator):
        if writer.group.is_coordinator:
            remove_older(writer.store, writer.directory, older, writer.group.rank)
