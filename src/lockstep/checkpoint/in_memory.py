"""Checkpoints in the memory of the machines: folders of ``/dev/shm``, in the format of those on disk.

Each machine has what its own ranks have written, and a copy of what those of the machine before it have. So a
checkpoint outlives the processes that wrote it, and, with several machines, any one of these. Gemini (Wang et al.,
SOSP 2023) places copies so, around a ring of machines.

First comes what one machine has, which holds no collective; then, as in ``save`` and ``load``, what the ranks tell each
other. Every collective stands below a comment that says what travels from which ranks to which. Files travel in a group
of gloo, of its own: they are no matter of a device, and training may go on meanwhile.
"""

from __future__ import annotations

import os
import re
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.folders import ELSEWHERE, CheckpointGroup, Folders, StagingArea, explained
from lockstep.checkpoint.format.documents import (
    MANIFEST,
    FileRecord,
    Manifest,
    Saved,
    digest_of,
    entry_of,
    record_of,
)
from lockstep.checkpoint.store.base import Store
from lockstep.checkpoint.store.local import LocalStore
from lockstep.checkpoint.store.verify import in_parallel, read_manifest, verify_checkpoint
from lockstep.checkpoint.writer import StagedState, Writer
from lockstep.comm.collectives import Communicator, raise_on_all_ranks
from lockstep.config.handlers import ProjectConfiguration
from lockstep.config.sources import memory_folder
from lockstep.errors import CheckpointError, UsageError
from lockstep.runtime.host_memory import free_host_bytes
from lockstep.runtime.memory_folder import MEMORY, MemoryFolder

NAME = re.compile(r"checkpoint_(0|[1-9]\d{0,17})\.([1-9]\d{0,17})")
MESSAGE_BYTES = 64 << 20
REMEDY = "Give /dev/shm more room (docker run --shm-size), or leave in_memory out; what was saved before is untouched."


@dataclass(frozen=True)
class MemoryCheckpoint:
    """One checkpoint in memory, as the first ranks of the machines know it together.

    Args:
        name: Its folder on each machine.
        manifest: Its bytes: what has another manifest is another checkpoint.
        holders: By file, the numbers of the machines that have it.
    """

    name: str
    manifest: bytes
    holders: Mapping[str, Sequence[int]]

    def __str__(self) -> str:
        return f"{self.name} in memory"

    @property
    def order(self) -> tuple[float, float]:
        return order_of(self.name)


@dataclass(frozen=True)
class Transfer:
    """A file that goes from one rank to another."""

    source: int
    target: int
    name: str
    nbytes: int


class FoldersInMemory:
    """What one machine has in memory, for the ranks on it. The same methods as ``Folders``, for a save.

    Args:
        project: Tells the number of the next checkpoint on disk; those in memory are named after it.
        folders: Those on disk.
        rank: This rank.
        machines: The ranks of each machine.
    """

    def __init__(
        self, project: ProjectConfiguration, folders: Folders, rank: int, machines: Sequence[Sequence[int]]
    ) -> None:
        self._project = project
        self._folders = folders
        self._checked: int | None = None
        self.store = LocalStore()
        self.machines = machines
        self.machine = next(number for number, ranks in enumerate(machines) if rank in ranks)
        self.group = CheckpointGroup(rank, list(machines[self.machine]))
        self.path = _of_project(memory_folder(), project)
        self.last = 0

    def make(self) -> None:
        """Make the folder. Without a launcher that keeps it, it is gone when this process ends.

        Raises:
            UsageError: this system has no memory that outlives a process.
        """
        try:
            if not self.path:
                folder = MemoryFolder()
                weakref.finalize(self, folder.close)
                self.path = _of_project(folder.path, self._project)
            os.makedirs(self.path, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"save_state(in_memory=True) needs a folder in {MEMORY}, which cannot be made here: {error}. Leave "
                "in_memory out."
            ) from error

    # For a save -----------------------------------------------------------------------------------------

    def next(self, output_dir: str | os.PathLike[str] | None) -> tuple[Store, str]:
        """Return where the next checkpoint goes; ``last`` is its number among those in memory."""
        if output_dir is not None or not self._project.automatic_checkpoint_naming:
            raise UsageError(
                "save_state(in_memory=True) numbers its checkpoints among those of the project. Leave output_dir out, "
                "and pass ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
            )
        # A place that is far away is not looked at each time.
        if self._checked != self._project.iteration:
            self._folders.next(None)
            self._checked = self._project.iteration
        return self.store, f"{self.path}/checkpoint_{self._project.iteration}.{self.last}"

    def begin(self, store: Store, directory: str, is_numbered: bool) -> StagingArea:
        """Make an empty staging area for ``directory``, in place of what killed processes left."""
        with explained(f"Rank {self.group.rank} cannot write {directory}", ELSEWHERE):
            for name in self.store.children(self.path):
                if not NAME.fullmatch(name):
                    self.store.abandon(f"{self.path}/{name}")
            return StagingArea(store.begin(directory), replaces=False, older=[])

    def unlock(self, directory: str) -> None:
        """Do nothing: the folder is the launch's own."""

    def check_room(self, nbytes: Sequence[int]) -> None:
        """Raise CheckpointError if this machine lacks memory for its part, and for its copy of another one's.

        Programs would be killed by then: /dev/shm may be larger than what a container, or the machine, has left.

        Args:
            nbytes: What each rank will write.
        """
        # The machine before this one on the ring; -1 is the last one, before the first.
        before = self.machines[self.machine - 1] if len(self.machines) > 1 else ()
        needed = sum(nbytes[rank] for rank in (*self.machines[self.machine], *before))
        in_folder = self.store.free_bytes(self.path)
        free = free_host_bytes() if in_folder is None else min(in_folder, free_host_bytes())
        if free < needed:
            raise CheckpointError(
                f"A checkpoint in memory takes {needed} bytes of {MEMORY} on the machine of rank {self.group.rank}, "
                f"but {free} are free there for programs. {REMEDY}"
            )

    def copies(self, written: Sequence[Mapping[str, FileRecord]]) -> list[Transfer]:
        """Return what goes to the next machine, of what each rank has ``written``: each rank's to one rank
        there.
        """
        found = []
        for number, ranks in enumerate(self.machines if len(self.machines) > 1 else ()):
            targets = self.machines[(number + 1) % len(self.machines)]
            for place, source in enumerate(ranks):
                # The next machine may have fewer ranks.
                target = targets[place % len(targets)]
                found += [
                    Transfer(source, target, name, record.size) for name, record in written[source].items()
                ]
        return found

    def remove_others(self, directory: str) -> None:
        """Remove all checkpoints in memory but this one."""
        for name in self.store.children(self.path):
            if f"{self.path}/{name}" != directory:
                self.store.abandon(f"{self.path}/{name}")

    # For a load -----------------------------------------------------------------------------------------

    def found(self) -> dict[str, tuple[bytes, list[str]]]:
        """Return the checkpoints here, by name: their manifests, and which of their files are here."""
        found = {}
        for name in self.store.children(self.path) if self.path else ():
            folder = f"{self.path}/{name}"
            try:
                manifest = read_manifest(self.store, folder) if NAME.fullmatch(name) else None
                files = self.store.files(folder)
            except (CheckpointError, OSError):
                # Another process removes it, or it is damaged.
                continue
            if manifest is not None:
                # A copy that was cut short has another size; digests are compared when it is loaded.
                here = [file for file, entry in manifest.files.items() if files.get(file) == entry.size]
                found[name] = manifest.to_bytes(), here
        return found

    def damaged(self, checkpoint: MemoryCheckpoint) -> list[str]:
        """Return the files, of this rank's share of those here, whose content is not what the manifest says."""
        manifest = Manifest.from_bytes(checkpoint.manifest, str(checkpoint))
        first, step = self.group.share
        here = sorted(name for name, holders in checkpoint.holders.items() if self.machine in holders)
        mine = here[first::step]
        found = in_parallel(self._digest, [f"{self.path}/{checkpoint.name}/{name}" for name in mine])
        return [
            name for name, digest in zip(mine, found, strict=True) if digest != manifest.files[name].blake3
        ]

    def _digest(self, path: str) -> str:
        try:
            return record_of(self.store.blocks(path)).blake3
        except OSError:
            return ""

    def missing(self, checkpoint: MemoryCheckpoint, damaged: Sequence[Sequence[str]]) -> list[Transfer]:
        """Return what each machine lacks of a checkpoint; the ranks of it and of those that have it share the work.

        Args:
            damaged: The files of each rank's share that are damaged on its machine.
        """
        manifest = Manifest.from_bytes(checkpoint.manifest, str(checkpoint))
        broken = [{name for rank in ranks for name in damaged[rank]} for ranks in self.machines]
        # Of what is damaged everywhere all get a copy, so that all name the damage.
        whole = {
            name: [number for number in holders if name not in broken[number]] or holders
            for name, holders in checkpoint.holders.items()
        }
        found = []
        for number, ranks in enumerate(self.machines):
            absent = [name for name in sorted(manifest.files) if number not in whole[name]]
            for place, name in enumerate(absent):
                holders = whole[name]
                sources = self.machines[holders[(number + place) % len(holders)]]
                source, target = sources[place % len(sources)], ranks[place % len(ranks)]
                found.append(Transfer(source, target, name, manifest.files[name].size))
        return found

    def prepare(self, checkpoint: MemoryCheckpoint) -> None:
        """Make the folder of a checkpoint of which this machine may have nothing, or something of the same name."""
        folder = f"{self.path}/{checkpoint.name}"
        here = self.found().get(checkpoint.name)
        if here is None or here[0] != checkpoint.manifest:
            shutil.rmtree(folder, ignore_errors=True)
            os.makedirs(folder, mode=0o700)
            self.store.write(f"{folder}/{MANIFEST}", [checkpoint.manifest])


def _of_project(folder: str | None, project: ProjectConfiguration) -> str:
    """Return a folder for each project: one launch may train several."""
    if folder is None:
        return ""
    place = str(project.project_dir or "")
    return f"{folder}/{digest_of((place if '://' in place else os.path.abspath(place)).encode())[:16]}"


def order_of(name: str) -> tuple[float, float]:
    """Ascending from older to newer: ``checkpoint_3.7`` in memory was saved before ``checkpoint_3`` on disk."""
    number, _, after = name.rpartition("_")[2].partition(".")
    return float(number), float(after or "inf")


def newest_first(
    on_disk: Sequence[str], in_memory: Sequence[MemoryCheckpoint]
) -> list[str | MemoryCheckpoint]:
    """Return the order in which to try them."""
    places: list[tuple[tuple[float, float], str | MemoryCheckpoint]] = [
        (order_of(path), path) for path in on_disk
    ]
    places += [(one.order, one) for one in in_memory]
    return [place for _, place in sorted(places, key=lambda pair: pair[0], reverse=True)]


def complete(listings: Sequence[Mapping[str, tuple[bytes, Sequence[str]]]]) -> list[MemoryCheckpoint]:
    """Return the checkpoints that all machines together have whole."""
    holders: dict[tuple[str, bytes], dict[str, list[int]]] = {}
    for number, listing in enumerate(listings):
        for name, (manifest, files) in listing.items():
            of_file = holders.setdefault((name, manifest), {})
            for file in files:
                of_file.setdefault(file, []).append(number)
    found = []
    for (name, manifest), of_file in holders.items():
        if Manifest.from_bytes(manifest, name).files.keys() <= of_file.keys():
            found.append(MemoryCheckpoint(name, manifest, of_file))
    return found


def file_to_send(path: str, nbytes: int) -> torch.Tensor:
    """Return the bytes of a file, mapped."""
    return torch.from_file(path, shared=False, size=nbytes, dtype=torch.uint8)


def file_to_receive(path: str, nbytes: int) -> torch.Tensor:
    """Return a new file of this size, mapped. Its memory is taken now: without, a later write would end the
    process.
    """
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


# Between the ranks ----------------------------------------------------------------------------------


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
