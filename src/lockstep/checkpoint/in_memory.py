"""Save to the memory of the machines, and load from there: what the ranks tell each other, step by step.

As in ``save`` and ``load``, every collective stands below a comment that says what travels from which ranks to which.
Files travel in a group of gloo, of its own: they are no matter of a device, and training may go on meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.folders import explained
from lockstep.checkpoint.folders_in_memory import (
    MESSAGE_BYTES,
    REMEDY,
    FoldersInMemory,
    MemoryCheckpoint,
    Transfer,
    complete,
    file_to_receive,
    file_to_send,
)
from lockstep.checkpoint.format.documents import FileRecord, Manifest, Saved, entry_of
from lockstep.checkpoint.store.verify import verify_checkpoint
from lockstep.checkpoint.writer import StagedState, Writer
from lockstep.comm.collectives import Communicator, raise_on_all_ranks
from lockstep.errors import CheckpointError


def open_memory(checkpointer: Checkpointer) -> FoldersInMemory:
    """Return the folders of all machines, made when they are first needed. Collective."""
    communicator, runtime = checkpointer.communicator, checkpointer.runtime
    if checkpointer.memory is None:
        # From each rank to all: on which machine it is, by the first rank there.
        first = runtime.rank - runtime.local_rank
        firsts: list[int] = communicator.gather_object([first])
        machines = [[rank for rank, of in enumerate(firsts) if of == one] for one in sorted(set(firsts))]
        checkpointer.memory = FoldersInMemory(
            checkpointer.project, checkpointer.folders, runtime.rank, machines
        )
    return checkpointer.memory


def begin_saving(checkpointer: Checkpointer) -> FoldersInMemory:
    """Return the folders of all machines, so that each rank can write into its own. Collective, once a
    run.
    """
    memory, communicator = open_memory(checkpointer), checkpointer.communicator
    if not checkpointer.saves_in_memory:
        # From each rank to all: whether the first rank of its machine could make the folder. Then, from the first ranks
        # to all: where it is, and the highest number that a checkpoint in it has.
        with raise_on_all_ranks(communicator):
            if memory.group.is_coordinator:
                memory.make()
        found = memory.found() if memory.group.is_coordinator else {}
        made = communicator.gather_object([(memory.path, found)])
        memory.path = made[memory.group.coordinator][0]
        names = [name for _, found in made for name in found]
        memory.last = max((int(name.rpartition(".")[2]) for name in names), default=0)
        checkpointer.saves_in_memory = True
    # Here, where all ranks are: the save may fail on one of them.
    memory.last += 1
    return memory


def write_in_memory(
    communicator: Communicator, writer: Writer, staged: StagedState, memory: FoldersInMemory, adds: bool
) -> None:
    """Write files, copy them to another machine, publish them on both, and remove older ones. Collective.

    Args:
        communicator: Of all ranks, on gloo.
        writer: This rank's part in it.
        staged: What this rank writes.
        memory: The folders.
        adds: Whether others than Lockstep have written into the staging area.
    """
    coordinator = writer.group.is_coordinator
    try:
        # From each rank to all: how many bytes it will write; then whether the first rank of each machine finds memory
        # for those written there, and for the copies that come from another machine.
        sizes = communicator.gather_object([staged.nbytes])
        with raise_on_all_ranks(communicator):
            if coordinator:
                memory.check_room(sizes)

        # From each rank to all: whether it has written its files; then their sizes and digests, and what it knows of
        # the save. All manifests have that of the first rank: clocks and versions may differ, and what has another
        # manifest is another checkpoint.
        with raise_on_all_ranks(communicator):
            mine = writer.write_data(staged)
        gathered = communicator.gather_object([(mine, staged.saved)])
        written, saved = [files for files, _ in gathered], gathered[0][1]

        # From the first rank of each machine to all: files that hooks have written there.
        if adds:
            with raise_on_all_ranks(communicator):
                known = {name for rank in writer.group.ranks for name in written[rank]}
                added = writer.seal_added(known) if coordinator else {}
            for rank, of_rank in enumerate(communicator.gather_object([added])):
                written[rank].update(of_rank)

        # From each rank to one on the next machine: its files. Then, from each rank to all: whether all is published.
        _transfer(communicator, memory.copies(written), writer.staging)
        with raise_on_all_ranks(communicator):
            content = _manifest(saved, written).to_bytes()
            if coordinator:
                with explained(f"Rank {writer.group.rank} could not publish {writer.directory}", REMEDY):
                    writer.store.publish(writer.directory, writer.staging, content)
    except BaseException:
        writer.abandon()
        raise
    # Every machine has the new one.
    if coordinator:
        memory.remove_others(writer.directory)


def candidates_in_memory(checkpointer: Checkpointer) -> list[MemoryCheckpoint]:
    """Return the checkpoints that the machines together have whole in memory. Collective."""
    memory = open_memory(checkpointer)
    # From the first rank of each machine to all: what it has.
    found = memory.found() if memory.group.is_coordinator else {}
    listings = checkpointer.communicator.gather_object([found])
    return complete([listings[ranks[0]] for ranks in memory.machines])


@contextmanager
def opened_in_memory(checkpointer: Checkpointer, checkpoint: MemoryCheckpoint) -> Iterator[str]:
    """Open the folder of a checkpoint on this machine, with all its files, verified. Collective.

    Raises:
        CheckpointError: all copies of a file are damaged, or there is no room for what other machines have of it.
    """
    memory, communicator = open_memory(checkpointer), checkpointer.communicator
    # From each rank to all: whether its machine has a folder for the checkpoint; and where it is.
    with raise_on_all_ranks(communicator):
        if memory.group.is_coordinator:
            memory.make()
            memory.prepare(checkpoint)
    memory.path = communicator.gather_object([memory.path])[memory.group.coordinator]
    folder = f"{memory.path}/{checkpoint.name}"

    # From each rank to all: which of its share of the files here have other digests than the manifest's.
    with raise_on_all_ranks(communicator):
        mine = memory.damaged(checkpoint)
    damaged = communicator.gather_object([mine])

    # From ranks of machines that have a whole file to ranks of those that lack it: that file, in a group that all make.
    missing = memory.missing(checkpoint, damaged)
    if missing:
        _transfer(checkpointer.gloo_communicator(), missing, folder)

    # From each rank to all: whether its share of the files is whole now. A damaged one may have had no other copy.
    if missing or any(damaged):
        with raise_on_all_ranks(communicator):
            verify_checkpoint(memory.store, folder, memory.group.share)
    yield folder


def _transfer(communicator: Communicator, transfers: Sequence[Transfer], folder: str) -> None:
    """Send files of ``folder``, and receive others into it. Collective."""
    if not transfers:
        return
    rank = communicator.runtime.rank
    # From each rank to all: whether it has memory for what it will receive.
    with raise_on_all_ranks(communicator):
        sent, received, parts = [], [], []
        for one in transfers:
            path = f"{folder}/{one.name}"
            with explained(f"Rank {rank} could not copy {path}", REMEDY):
                if one.target == rank:
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    parts.append(path)
                    received.append((file_to_receive(f"{path}.part", one.nbytes), one.source))
                elif one.source == rank:
                    sent.append((file_to_send(path, one.nbytes), one.target))
    communicator.exchange_bytes(sent, received, MESSAGE_BYTES)
    # From each rank to all: whether what has come has its name.
    with raise_on_all_ranks(communicator):
        # A file has its full size before its bytes come, so only the name tells a reader that they have come.
        for path in parts:
            os.replace(f"{path}.part", path)


def _manifest(saved: Saved, written: Sequence[dict[str, FileRecord]]) -> Manifest:
    records: dict[str, tuple[int, FileRecord]] = {}
    for rank, of_rank in enumerate(written):
        for name, record in of_rank.items():
            if records.setdefault(name, (rank, record))[1] != record:
                raise CheckpointError(
                    f"Hooks of ranks {records[name][0]} and {rank} have written different files {name}. Let the hook "
                    "that runs before save_state write on the main process only."
                )
    return Manifest(saved=saved, files={name: entry_of(record) for name, (_, record) in records.items()})
