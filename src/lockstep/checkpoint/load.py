"""Load the state of a run: what the ranks tell each other, step by step.

As in ``save``, every collective of a load stands in this file, in its order, below a comment that says what travels
from which ranks to which; what is called in between looks, reads or changes this rank's objects, and holds none. Those
that bring checkpoints from the memory of other machines are in ``in_memory``. All ranks look at everything before
anything is changed.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.contents import CheckpointContents
from lockstep.checkpoint.folders import folder_of
from lockstep.checkpoint.format.documents import Manifest, canonical, digest_of
from lockstep.checkpoint.global_state import first_ranks, global_names, local_names
from lockstep.checkpoint.in_memory import (
    MemoryCheckpoint,
    candidates_in_memory,
    newest_first,
    opened_in_memory,
)
from lockstep.checkpoint.load_plan import create_load_plan
from lockstep.checkpoint.reader import Checkpoint
from lockstep.checkpoint.store.base import Store, UnreachableError
from lockstep.checkpoint.store.verify import download, make_folder, read_listed, verify_checkpoint
from lockstep.comm.collectives import raise_on_all_ranks
from lockstep.errors import LockstepError, NoCheckpointError

logger = logging.getLogger("lockstep.checkpoint")


def load_checkpoint(
    checkpointer: Checkpointer,
    input_dir: str | os.PathLike[str] | None,
    list_contents: Callable[[], CheckpointContents],
) -> str:
    """Restore a checkpoint and return its directory. Every rank calls it, and all raise alike.

    Args:
        checkpointer: What the run keeps between saves.
        input_dir: The directory, or None for the project's newest checkpoint that is whole, in memory or on disk.
        list_contents: What is restored, looked at when it is called.
    """
    communicator, group, folders = checkpointer.communicator, checkpointer.group, checkpointer.folders

    # From each rank to all: whether it was called as it can be.
    with raise_on_all_ranks(communicator):
        contents = list_contents()
    checkpointer.wait()

    # From each rank to all: whether it has a place to load from. Then, from the coordinator to the others, which
    # checkpoints are there: file systems may show a new directory to some ranks later.
    with raise_on_all_ranks(communicator):
        store, found = folders.candidates(input_dir)
    on_disk: list[str] = communicator.gather_object([found])[group.coordinator]

    # From the first rank of each machine to all, for the project's newest: the checkpoints that it has in memory.
    in_memory = candidates_in_memory(checkpointer) if input_dir is None else []
    places: list[str | MemoryCheckpoint] = newest_first(on_disk, in_memory) if in_memory else [*on_disk]
    if not places:
        raise NoCheckpointError(
            f"There is no checkpoint in {folder_of(checkpointer.project)}. Save one first."
        )

    first_failure: Exception | None = None
    with ExitStack() as copies:
        for place in places:
            try:
                if isinstance(place, MemoryCheckpoint):
                    folder = copies.enter_context(opened_in_memory(checkpointer, place))
                else:
                    folder = copies.enter_context(_verified(checkpointer, store, place))
                break
            except LockstepError as error:
                # From each rank to all: whether the place did not answer. An older checkpoint is no answer to that.
                if any(communicator.gather_object([isinstance(error, UnreachableError)])):
                    raise
                folders.damaged.add(str(place))
                if first_failure is None or isinstance(first_failure, NoCheckpointError):
                    first_failure = error
                if len(places) > 1 and group.is_coordinator:
                    logger.warning("Skipped %s: %s", place, error)
        else:
            assert first_failure is not None
            raise first_failure
        is_on_disk = not isinstance(place, MemoryCheckpoint)
        if first_failure is not None and group.is_coordinator:
            logger.warning("Loading %s instead.", place)
        _restore(checkpointer, folder, contents)

    # From each rank to all: whether it could look for the number of the next checkpoint.
    if checkpointer.project.automatic_checkpoint_naming:
        with raise_on_all_ranks(communicator):
            checkpointer.project.iteration = folders.next_number()
    return str(place) if is_on_disk else folder


@contextmanager
def _verified(checkpointer: Checkpointer, store: Store, directory: str) -> Iterator[str]:
    """Open a local folder with a whole checkpoint: it, or a copy of one that is elsewhere. Collective.

    For a copy each file is read once a machine, its ranks share the work, and its digest is compared meanwhile. It lies
    where ``tempfile`` makes folders (``TMPDIR``), only this user can open it, and it is removed afterwards.

    Raises:
        NoCheckpointError: nothing was published there.
        CheckpointError: a file is missing, of another size or content; or there is no room for a copy.
    """
    communicator, group, runtime = checkpointer.communicator, checkpointer.group, checkpointer.runtime

    # From each rank to all: whether its share of the files has the digests of the manifest.
    if store.is_local:
        with raise_on_all_ranks(communicator):
            verify_checkpoint(store, directory, group.share)
        yield directory
        return

    # From the coordinator to all: the manifest. What one rank sees is what all load, should another run replace it now.
    read: Manifest | None = None
    with raise_on_all_ranks(communicator):
        if group.is_coordinator:
            read = read_listed(store, directory)
    manifest: Manifest = communicator.gather_object([read])[group.coordinator]

    # From the first rank of each machine to its others: the folder of the copy.
    made = ""
    try:
        with raise_on_all_ranks(communicator):
            if runtime.is_local_main:
                made = make_folder(manifest, directory)
        folder: str = communicator.gather_object([made])[runtime.rank - runtime.local_rank]

        # From each rank to all: whether its share of the files has come whole.
        with raise_on_all_ranks(communicator):
            share = slice(runtime.local_rank, None, runtime.local_world_size)
            download(store, directory, manifest, sorted(manifest.files)[share], folder)
        yield folder
    finally:
        if made:
            shutil.rmtree(made, ignore_errors=True)


def _restore(checkpointer: Checkpointer, folder: str, contents: CheckpointContents) -> None:
    """Put the state of a verified checkpoint into the run. Collective."""
    communicator, group, rank = checkpointer.communicator, checkpointer.group, checkpointer.runtime.rank

    # From each rank to all: whether the documents can be read, and what hooks of the user have said.
    with raise_on_all_ranks(communicator):
        checkpoint = Checkpoint(folder)
        models = list(contents.models)
        for hook in list(checkpointer.hooks.load.values()):
            hook(models, checkpoint.root)

    # From each rank to all: a digest of the names of its tensors and parameters. Where they differ, as ranks have other
    # blocks of a model, then each such list of names, from the first rank that has it to all.
    with raise_on_all_ranks(communicator):
        names = local_names(contents)
        digest = digest_of(canonical(names))
    firsts = first_ranks(communicator.gather_object([digest]))
    documents = [names]
    if any(firsts):
        sent = communicator.gather_object([names if firsts[rank] == rank else None])
        documents = [sent[first] for first in firsts]

    # From each rank to all: whether everything fits this run. Nothing has been changed.
    with raise_on_all_ranks(communicator):
        plan = create_load_plan(
            checkpoint, contents, models, rank, communicator.world_size, global_names(documents)
        )

    # From each rank to all: whether the objects have taken their states.
    with raise_on_all_ranks(communicator):
        plan.apply()

    # In an open accumulation window of a sharded model: shards of parameters with gradients, among the ranks that share
    # the parameters, as torch puts such gradients on whole ones.
    plan.open_window()
    if plan.left and group.is_coordinator:
        logger.warning(
            "%s was imported and holds no %s. This part of the run is left as it is.",
            folder,
            " and ".join(plan.left),
        )
