"""Save the state of a run: what the ranks tell each other, step by step.

Every collective of a save stands in this file, in its order, below a comment that says what travels from which ranks
to which. Everything that is called in between plans, names or touches files, and holds none. Two kinds are used:

    raise_on_all_ranks   a block that may fail on one rank alone; at its end each rank tells all whether it has failed,
                         so that none goes on to a collective in which the others will not come
    gather_object        each rank sends a value to all, and has a list of what they sent, by rank

``save`` is what is done at once, ``write_checkpoint`` what a thread may do while training goes on, in a process group
of its own. A checkpoint is there once the coordinator has published it, by one rename or one put; until then nothing
that was saved before is touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.contents import CheckpointContents, SaveHook
from lockstep.checkpoint.folders import StagingArea, remove_older
from lockstep.checkpoint.format.documents import (
    STATE,
    TENSORS,
    Saved,
    canonical,
    digest_of,
    rank_file,
    versions,
)
from lockstep.checkpoint.format.tensors import TensorFile
from lockstep.checkpoint.global_state import (
    digests_of,
    first_ranks,
    merge_states,
    refuse_missing_tensors,
    refuse_other_contents,
    split_divergent_state,
)
from lockstep.checkpoint.planner import SavePlan
from lockstep.checkpoint.state import RankState, collect, collect_random
from lockstep.checkpoint.writer import StagedState, Writer, now
from lockstep.comm.collectives import Communicator, raise_on_all_ranks
from lockstep.comm.dtensor import whole
from lockstep.errors import UsageError


def save(
    checkpointer: Checkpointer,
    output_dir: str | os.PathLike[str] | None,
    list_contents: Callable[[], CheckpointContents],
    settings: Mapping[str, object],
    blocking: bool = True,
    add_files: Callable[[str], None] | None = None,
) -> str:
    """Write a checkpoint and return its directory. Every rank calls it, and all raise alike.

    Args:
        checkpointer: What the run keeps between saves.
        output_dir: Where, or None for the project's next numbered directory.
        list_contents: What is saved, looked at when it is called.
        settings: How the run is set up, for the manifest.
        blocking: False: return when this rank's part has been copied in host memory; a failure after that is raised by
            the next call.
        add_files: Called on each rank with the local directory in which the checkpoint is made; files that it writes
            there belong to it.
    """
    communicator, group, folders = checkpointer.communicator, checkpointer.group, checkpointer.folders
    planner, rank = checkpointer.planner, checkpointer.group.rank

    # From each rank to all: whether it was called as it can be.
    with raise_on_all_ranks(communicator):
        contents = list_contents()
    checkpointer.wait()

    # From each rank to all: ``blocking``.
    if len(set(communicator.gather_object([bool(blocking)]))) > 1:
        raise UsageError("The ranks differ in blocking. Pass the same to save_state on every rank.")

    # From each rank to all: whether it has a place to save to; then the place.
    with raise_on_all_ranks(communicator):
        store, directory = folders.next(output_dir)
    directories = communicator.gather_object([directory])

    with ExitStack() as undo:
        undo.callback(folders.unlock, directory)

        # From the coordinator to the ranks that share the directory: its staging area, once the directory is locked.
        begun: StagingArea | None = None
        with raise_on_all_ranks(communicator):
            group.refuse_different(directories)
            if group.is_coordinator:
                begun = folders.begin(store, directory, is_numbered=output_dir is None)
        area: StagingArea = communicator.gather_object([begun])[group.coordinator]
        writer = Writer(store, directory, area.path, group)
        undo.callback(writer.abandon)

        # From each rank to all: what it has prepared, and digests of buffers and objects of which copies may differ.
        with raise_on_all_ranks(communicator):
            state = collect(contents, rank)
            digests = digests_of(state) if communicator.world_size > 1 else {}
        by_rank = communicator.gather_object([(state.common["contents"], digests)])
        refuse_other_contents([of_rank for of_rank, _ in by_rank])
        split_divergent_state(state, [of_rank for _, of_rank in by_rank], rank, group.ranks)

        # Where a hook wants to see them: every shard of the weights, to all ranks of its mesh; tensor after tensor.
        if checkpointer.hooks.save:
            with raise_on_all_ranks(communicator):
                _refuse_url(writer)
                shards = [model.state_dict() for model in contents.models]
            weights = whole(shards)
            with raise_on_all_ranks(communicator):
                _run_hooks(checkpointer.hooks.save.values(), contents, weights, state, area.path)
                collect_random(state, rank)  # a hook that builds a model draws its weights

        # From each rank to all: whether it has added its files.
        if add_files is not None:
            with raise_on_all_ranks(communicator):
                add_files(area.path)

        # Where machines share no file system: every shard of everything, to all ranks of its mesh.
        if checkpointer.project.save_on_each_node and len(group.ranks) < communicator.world_size:
            gathered = whole(state.tensors, keep=group.is_coordinator)
            state.tensors = {name: tensor for name, tensor in gathered.items() if tensor is not None}

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
        local_plans = None
        if planner.is_outdated(signatures):
            local_plans = communicator.gather_object([planner.create_local_plan(tensors, own=state.of_first)])

        # From each rank to all: whether it can write its part of that plan.
        with raise_on_all_ranks(communicator):
            state.common = merge_states(documents, group.ranks, contents)
            if local_plans is not None:
                planner.create_global_plan(local_plans, signatures)
            plan = planner.plan
            if not checkpointer.hooks.save:
                refuse_missing_tensors(contents, state.common, plan.index)
            writer.check_room(plan.nbytes)
            staged = _stage(plan, tensors, state, settings, checkpointer)

        # From each rank to all: whether it had memory for a copy. Then, once a run, all make a group for the thread.
        if not blocking:
            background = checkpointer.background
            with raise_on_all_ranks(communicator):
                staged.tensors = background.stager.stage(staged.tensors)
            if background.communicator is None:
                own_group = dist.new_group(backend="gloo") if communicator.world_size > 1 else None
                background.communicator = Communicator(
                    replace(checkpointer.runtime, backend="gloo"), own_group
                )
            communicator = background.communicator
        undo.pop_all()

    # Now: if writing fails after it has published, the number is taken.
    checkpointer.project.iteration += output_dir is None

    def write() -> None:
        try:
            write_checkpoint(communicator, writer, staged, area.replaces, area.older)
        finally:
            folders.unlock(directory)
        if checkpointer.runtime.is_main:
            checkpointer.committed(directory)

    if blocking:
        write()
    else:
        checkpointer.background.start(write, directory)
    return directory


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


def _run_hooks(
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
    """Inside, ``state_dict`` of a model gives the weights that were gathered: one rank may save them alone."""
    with ExitStack() as handles:
        for model, gathered in zip(contents.models, weights, strict=True):
            handles.callback(model.register_state_dict_post_hook(partial(_show, dict(gathered))).remove)
        yield


def _show(gathered: dict[str, object], _: object, state: dict[str, object], prefix: str, *__: object) -> None:
    state.update({prefix + name: tensor for name, tensor in gathered.items() if prefix + name in state})


def _refuse_url(writer: Writer) -> None:
    if not writer.store.is_local:
        raise UsageError(
            f"A hook is registered that runs before save_state, and would write files into {writer.directory}, "
            "which is a URL. Save to a local directory, or remove the hook."
        )


def _stage(
    plan: SavePlan,
    tensors: Mapping[str, torch.Tensor],
    state: RankState,
    settings: Mapping[str, object],
    checkpointer: Checkpointer,
) -> StagedState:
    """What this rank will write; tensors are not copied."""
    group = checkpointer.group
    files = {file: TensorFile(plan.content(file, tensors)) for file in plan.mine}
    documents = {rank_file(group.rank): canonical(state.own)}
    if group.is_coordinator:
        documents[STATE] = canonical(state.common)
        documents[TENSORS] = plan.index_content
    others = {**settings}
    saved = Saved(
        time=now(),
        world_size=checkpointer.runtime.world_size,
        ranks=group.ranks,
        parallel=str(others.pop("parallel", "")),
        settings=others,
        versions=versions(),
    )
    return StagedState(files, documents, saved)
