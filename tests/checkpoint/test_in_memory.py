"""Checkpoints in memory: what is restored, which machine has what, and what happens to damaged and unfinished ones."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lockstep import ProjectConfiguration
from lockstep.checkpoint import FoldersInMemory, Writer
from lockstep.checkpoint.format import MANIFEST
from lockstep.errors import LockstepError
from lockstep.runtime import MemoryFolder
from tests.checkpoint.test_background import Run, differing
from tests.patching import module_of


def numbered(folder: str | Path) -> ProjectConfiguration:
    return ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)


def on_machines(run: Run, folder: str, machines: Sequence[Sequence[int]]) -> Path:
    """Let the ranks of this run be on these machines, each of which has a folder there; returns this rank's."""
    checkpointer = run.accelerator._checkpointer
    memory = FoldersInMemory(
        checkpointer.project, checkpointer.folders, run.accelerator.process_index, machines
    )
    path = Path(folder, f"machine-{memory.machine}")
    path.mkdir(exist_ok=True)
    memory.path, checkpointer.memory = str(path), memory
    return path


def failure(call: Callable[[], object]) -> str:
    try:
        call()
    except LockstepError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# What is restored -------------------------------------------------------------------------------------


def restores(parallel: str | None, folder: str, blocking: bool) -> dict[str, Any]:
    run = Run(parallel, numbered(folder))
    run.train(2)
    expected = run.state()
    saved = run.accelerator.save_state(in_memory=True, blocking=blocking)
    run.train(3)
    run.accelerator.wait_for_checkpoint()
    later = run.state()
    loaded = run.accelerator.load_state()
    mode = Path(saved).parents[1].stat().st_mode & 0o777
    run.accelerator.wait_for_everyone()  # the first rank's end is that of the folder
    return {
        "in memory": saved.startswith("/dev/shm/"),
        "loaded": loaded == saved,
        "trained": differing(later, expected),
        "differs": differing(run.state(), expected),
        "mode": mode,
    }


@pytest.mark.parametrize(
    ("world_size", "parallel", "blocking"),
    [
        (1, None, True),
        (2, "zero=3", False),
        (4, "zero=2 replicate=2", True),
    ],
)
def test_the_state_at_the_call_is_restored_from_memory(
    run_distributed: Any, tmp_path: Path, world_size: int, parallel: str | None, blocking: bool
) -> None:
    for found in run_distributed(restores, world_size, parallel, str(tmp_path), blocking):
        assert found["in memory"] and found["loaded"]
        assert {"sums", "values", "rng", "0.exp_avg"} < set(found["trained"])
        assert found["differs"] == []
        assert found["mode"] == 0o700
    assert not list(tmp_path.rglob("*.safetensors")), "nothing is written to the disk"


def newest(folder: str) -> list[str]:
    """Of checkpoints on disk and in memory in turn, which one is loaded."""
    run, loaded = Run(project=numbered(folder)), []
    for in_memory in (True, False, True, True, False):
        run.train(1)
        run.accelerator.save_state(in_memory=in_memory)
        path = Path(run.accelerator.load_state())
        place = "disk" if path.is_relative_to(folder) else "memory"
        loaded.append(f"{place} {path.name} {run.counter.values[-1]}")
    return loaded


def test_the_newest_is_loaded_wherever_it_is(run_distributed: Any, tmp_path: Path) -> None:
    assert (
        run_distributed(newest, 2, str(tmp_path))
        == [
            [
                "memory checkpoint_0.1 1",
                "disk checkpoint_0 2",
                "memory checkpoint_1.2 3",
                "memory checkpoint_1.3 4",
                "disk checkpoint_1 5",
            ]
        ]
        * 2
    )


def hooked(folder: str) -> list[str]:
    run, seen = Run(project=numbered(folder)), []

    def save(models: object, weights: object, output_dir: str) -> None:
        if run.accelerator.is_main_process:
            Path(output_dir, "notes.txt").write_text("of a hook")

    def load(models: object, input_dir: str) -> None:
        seen.append(Path(input_dir, "notes.txt").read_text())

    run.accelerator.register_save_state_pre_hook(save)
    run.accelerator.register_load_state_pre_hook(load)
    on_machines(run, folder, [[0], [1], [2]])
    run.accelerator.save_state(in_memory=True)
    run.accelerator.load_state()
    return seen


def test_files_of_hooks_come_to_the_machines_that_lack_them(run_distributed: Any, tmp_path: Path) -> None:
    assert run_distributed(hooked, 3, str(tmp_path)) == [["of a hook"]] * 3


def two_projects(folder: str) -> tuple[str, list[str]]:
    """In a launch, which has one folder in memory for all."""
    os.mkdir(f"{folder}/memory")
    with mock.patch.dict(os.environ, LOCKSTEP_MEMORY_FOLDER=f"{folder}/memory"):
        first, second = (Run(project=numbered(f"{folder}/{name}")) for name in ("first", "second"))
        first.accelerator.save_state(in_memory=True)
        expected = first.state()
        alone = failure(second.accelerator.load_state)
        second.train(1)
        second.accelerator.save_state(in_memory=True)
        first.train(1)
        first.accelerator.load_state()
        return alone, differing(first.state(), expected)


def test_two_projects_of_a_launch_do_not_see_each_other(run_distributed: Any, tmp_path: Path) -> None:
    ((alone, differs),) = run_distributed(two_projects, 1, str(tmp_path))
    assert alone.startswith("NoCheckpointError")
    assert differs == []
    assert len(list((tmp_path / "memory").glob("*/checkpoint_0.1/manifest.json"))) == 2


# Which machine has what -------------------------------------------------------------------------------

MACHINES = [[0], [1, 2], [3]]


def copied(folder: str) -> list[str]:
    run = Run("zero=3", numbered(folder))
    on_machines(run, folder, MACHINES)
    # As where clocks differ, or a second ends between two ranks.
    with mock.patch.object(
        module_of(Writer), "now", return_value=f"a clock of rank {run.accelerator.process_index}"
    ):
        for _ in range(2):
            run.train(1)
            run.accelerator.save_state(in_memory=True)
    run.accelerator.wait_for_everyone()
    return sorted(path.name for path in Path(folder).glob("machine-*/*"))


def test_each_machine_has_its_own_files_and_those_of_the_one_before(
    run_distributed: Any, tmp_path: Path
) -> None:
    assert run_distributed(copied, 4, str(tmp_path)) == [["checkpoint_0.2"] * 3] * 4
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / f"machine-{number}/checkpoint_0.2").iterdir()}
        for number in range(3)
    ]
    for number, found in enumerate(files):
        ranks = {name.split(".")[0].split("-")[1] for name in found if "-" in name}
        assert ranks == {f"{rank:05d}" for rank in MACHINES[number] + MACHINES[number - 1]}
    everything = {name: content for found in files for name, content in found.items()}
    assert all(everything[name] == content for found in files for name, content in found.items())
    assert {"manifest.json", "state.json", "tensors.json"} < everything.keys()


def survives(
    folder: str,
    lost: list[int],
    lose: Callable[[Path], object] = shutil.rmtree,
    machines: Sequence[Sequence[int]] = MACHINES,
) -> tuple[list[str], str, list[str]]:
    """The state after it was loaded without what some machines had; how loading failed; what this machine has then."""
    run = Run("zero=3", numbered(folder))
    here = on_machines(run, folder, machines)
    run.train(2)
    expected = run.state()
    run.accelerator.save_state(in_memory=True)
    run.train(1)
    run.accelerator.wait_for_everyone()
    memory = run.accelerator._checkpointer.memory
    assert memory is not None
    if memory.machine in lost and memory.group.is_coordinator:
        for child in here.iterdir():
            lose(child)
    run.accelerator.wait_for_everyone()
    said = failure(run.accelerator.load_state)
    files = sorted(path.name for path in here.glob("*/*")) if not said else []
    return differing(run.state(), expected), said, files


@pytest.mark.parametrize("lost", [[0], [2]])
def test_any_one_machine_may_be_lost(run_distributed: Any, tmp_path: Path, lost: list[int]) -> None:
    (tmp_path / "machine-0").mkdir()
    every_file: set[str] = set()
    for differs, said, files in run_distributed(survives, 4, str(tmp_path), lost):
        assert (differs, said) == ([], "")
        every_file = every_file or set(files)
        assert set(files) == every_file
    assert {name for name in every_file if name.startswith("rank-")} == {
        f"rank-{r:05d}.json" for r in range(4)
    }


def test_two_neighbours_that_are_lost_are_too_many(run_distributed: Any, tmp_path: Path) -> None:
    for differs, said, _ in run_distributed(survives, 4, str(tmp_path), [0, 1]):
        assert differs
        assert said.startswith("NoCheckpointError: There is no checkpoint in")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def flip_all(folder: Path) -> None:
    """A bit of every file, none of which changes its size; the manifest stays whole."""
    for path in folder.iterdir():
        if path.name != MANIFEST:
            flip(path)


@pytest.mark.parametrize(
    ("world_size", "machines", "harmed"), [(2, [[0], [1]], [0]), (4, MACHINES, [1]), (4, MACHINES, [2])]
)
def test_damaged_copies_are_replaced_by_whole_ones(
    run_distributed: Any, tmp_path: Path, world_size: int, machines: list[list[int]], harmed: list[int]
) -> None:
    contents: set[frozenset[tuple[str, bytes]]] = set()
    for differs, said, files in run_distributed(
        survives, world_size, str(tmp_path), harmed, flip_all, machines
    ):
        assert (differs, said) == ([], "")
        assert {f"rank-{rank:05d}.json" for rank in range(world_size)} < set(files)
    for number in range(len(machines)):
        folder = tmp_path / f"machine-{number}/checkpoint_0.1"
        contents.add(frozenset((path.name, path.read_bytes()) for path in folder.iterdir()))
    assert len(contents) == 1, "each machine has the same whole files then"


def test_a_file_of_which_all_copies_are_damaged_is_named(run_distributed: Any, tmp_path: Path) -> None:
    for differs, said, _ in run_distributed(survives, 4, str(tmp_path), [0, 1], flip_all):
        assert differs
        assert said.startswith("CheckpointError: ") and "is damaged: its BLAKE3 digest" in said


def stale(folder: str) -> list[str]:
    """Machine 1 comes back with what it had before the others went on."""
    run = Run(project=numbered(folder))
    here = on_machines(run, folder, [[0], [1]])
    run.train(1)
    run.accelerator.save_state(in_memory=True)
    run.accelerator.wait_for_everyone()
    rank = run.accelerator.process_index
    if rank == 1:
        shutil.copytree(here, f"{folder}/kept")
    run.train(1)
    run.accelerator.save_state(in_memory=True)
    expected = run.state()
    run.train(1)
    run.accelerator.wait_for_everyone()
    if rank == 1:
        shutil.rmtree(here)
        os.rename(f"{folder}/kept", here)
        os.rename(here / "checkpoint_0.1", here / "checkpoint_0.2")  # of the same name, even
    run.accelerator.wait_for_everyone()
    run.accelerator.load_state()
    return differing(run.state(), expected)


def test_parts_of_two_checkpoints_are_never_mixed(run_distributed: Any, tmp_path: Path) -> None:
    assert run_distributed(stale, 2, str(tmp_path)) == [[], []]


def loads_another_layout(folder: str, parallel: str | None) -> list[float]:
    run = Run(parallel, numbered(folder))
    on_machines(run, folder, [[rank] for rank in range(run.accelerator.num_processes)])
    if parallel == "zero=3":
        run.train(2)
        run.accelerator.save_state(in_memory=True)
    else:
        run.accelerator.load_state()
    return [value for name, t in run.state().items() if "weight" in name for value in t.flatten().tolist()]


def test_another_number_of_ranks_loads_it(run_distributed: Any, tmp_path: Path) -> None:
    saved = run_distributed(loads_another_layout, 3, str(tmp_path), "zero=3")
    for weights in run_distributed(loads_another_layout, 2, str(tmp_path), "ddp"):
        assert weights == saved[0]


# Damage and failures ----------------------------------------------------------------------------------


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit of a tensor": lambda folder: flip(next(folder.glob("model-*"))),
    "a bit of the manifest": lambda folder: flip(folder / "manifest.json"),
    "a file is missing": lambda folder: next(folder.glob("rank-*")).unlink(),
    "a file is shorter": lambda folder: os.truncate(next(folder.glob("state-*")), 10),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
}


def damaged(folder: str) -> dict[str, tuple[str, list[str]]]:
    run, found = Run(project=numbered(folder)), {}
    run.train(1)
    run.accelerator.save_state()
    expected = run.state()
    for kind, damage in DAMAGE.items():
        run.train(1)
        saved = run.accelerator.save_state(in_memory=True)
        run.accelerator.wait_for_everyone()
        if run.accelerator.is_main_process:
            damage(Path(saved))
        run.accelerator.wait_for_everyone()
        path = run.accelerator.load_state()
        found[kind] = Path(path).name, differing(run.state(), expected)
    return found


@pytest.mark.parametrize("world_size", [2])
def test_what_is_damaged_is_passed_over_for_the_disk(
    run_distributed: Any, tmp_path: Path, world_size: int
) -> None:
    for found in run_distributed(damaged, world_size, str(tmp_path)):
        assert found == dict.fromkeys(DAMAGE, ("checkpoint_0", []))


def full(folder: str, step: str) -> tuple[str, list[str], list[str]]:
    run = Run(project=numbered(folder))
    here = on_machines(run, folder, [[0], [1]])
    run.train(1)
    run.accelerator.save_state(in_memory=True)
    expected = run.state()
    run.train(1)
    original = getattr(os, step)

    def fails(handle: int, *arguments: Any) -> Any:
        if f"{folder}/machine-1" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(handle, *arguments)

    with mock.patch.object(os, step, fails):
        said = failure(lambda: run.accelerator.save_state(in_memory=True))
    run.accelerator.wait_for_everyone()
    left = sorted(path.name for path in here.iterdir())
    run.accelerator.load_state()
    return said, left, differing(run.state(), expected)


@pytest.mark.parametrize("step", ["posix_fallocate"])
def test_without_room_on_one_machine_all_keep_the_one_before(
    run_distributed: Any, tmp_path: Path, step: str
) -> None:
    for rank, (said, left, differs) in enumerate(run_distributed(full, 2, str(tmp_path), step)):
        assert said.startswith("CheckpointError") and "No space left on device" in said
        assert ("Rank 1 failed with" in said) == (rank == 0)
        assert (left, differs) == (["checkpoint_0.1"], [])


def too_large(folder: str) -> tuple[str, list[str], list[str]]:
    """Three machines; what is left on the second one is its part and that of the first, less a byte."""
    run = Run(project=numbered(folder))
    rank = run.accelerator.process_index
    here = on_machines(run, folder, [[0], [1], [2]])
    run.train(1)
    run.accelerator.save_state(in_memory=True)
    expected = run.state()
    files = [path for path in (here / "checkpoint_0.1").iterdir() if path.name != MANIFEST]
    of_tensors = [path.read_bytes()[:8] for path in files if path.suffix == ".safetensors"]
    headers = sum(8 + int.from_bytes(length, "little") for length in of_tensors)
    needed = sum(path.stat().st_size for path in files) - headers
    with mock.patch.object(module_of(FoldersInMemory), "free_host_bytes") as free:
        free.return_value = needed - (rank == 1)
        said = failure(lambda: run.accelerator.save_state(in_memory=True))
        free.return_value = needed
        unlimited = failure(lambda: run.accelerator.save_state(in_memory=True))
    run.accelerator.load_state()
    return said, unlimited, differing(run.state(), expected)


def test_more_than_programs_have_left_is_refused_before_it_is_written(
    run_distributed: Any, tmp_path: Path
) -> None:
    for rank, (said, unlimited, differs) in enumerate(run_distributed(too_large, 3, str(tmp_path))):
        assert said.startswith("CheckpointError") and "are free there for programs" in said
        assert "on the machine of rank 1" in said and ("Rank 1 failed with" in said) == (rank != 1)
        assert (unlimited, differs) == ("", [])


def refused(folder: str) -> list[str]:
    unnumbered, run = Run(), Run(project=numbered(folder))
    with mock.patch.object(MemoryFolder, "__init__", side_effect=FileNotFoundError(2, "No such file")):
        said = [failure(lambda: run.accelerator.save_state(in_memory=True))]
    said.append(failure(lambda: unnumbered.accelerator.save_state(in_memory=True)))
    said.append(failure(lambda: run.accelerator.save_state("elsewhere", in_memory=True)))
    Path(folder, "checkpoints/checkpoint_4").mkdir(parents=True, exist_ok=True)
    said.append(failure(lambda: run.accelerator.save_state(in_memory=True)))
    return said


def test_calls_that_cannot_be_right_are_refused_on_all_ranks(run_distributed: Any, tmp_path: Path) -> None:
    for said in run_distributed(refused, 2, str(tmp_path)):
        assert ["/dev/shm" in one for one in said] == [True, False, False, False]
        assert all(one.startswith("UsageError") for one in said)
        assert "automatic_checkpoint_naming=True" in said[1]
        assert "Leave output_dir out" in said[2]
        assert "checkpoint_4 exists already" in said[3]


# The folder in memory ---------------------------------------------------------------------------------


def test_folders_of_processes_that_were_killed_are_removed_and_no_others(tmp_path: Path) -> None:
    def leave() -> str:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.write(writer, MemoryFolder().path.encode())
            os._exit(0)
        os.waitpid(child, 0)
        return os.read(reader, 100).decode()

    mine, foreign = MemoryFolder(), Path("/dev/shm/lockstep-memory-of-somebody")
    foreign.mkdir(exist_ok=True)
    try:
        left = leave()
        assert os.path.isdir(left)
        another = MemoryFolder()
        assert not os.path.exists(left)
        assert os.path.isdir(mine.path) and foreign.is_dir()
        another.close()
        assert not os.path.exists(another.path)
    finally:
        foreign.rmdir()
        mine.close()


def outlives_children(folder: str) -> list[tuple[bool, list[str]]]:
    """After a forked child has ended in each way: whether the folder is there, and what a load does not restore."""
    run, found = Run(project=numbered(folder)), []
    saved = run.accelerator.save_state(in_memory=True)
    expected = run.state()
    for way in ("exits", "collects"):
        child = os.fork() if run.accelerator.is_main_process else None
        if child == 0:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 2)
            # As the interpreter does at its end.
            if way == "collects":
                run.accelerator._checkpointer.memory = None
                gc.collect()
            weakref.finalize._exitfunc()  # type: ignore[attr-defined]
            os._exit(0)
        if child:
            os.waitpid(child, 0)
        run.train(1)
        run.accelerator.wait_for_everyone()
        is_there = Path(saved).is_dir()
        run.accelerator.load_state()
        found.append((is_there, differing(run.state(), expected)))
    return found


@pytest.mark.parametrize("world_size", [2])
def test_the_end_of_a_forked_child_removes_nothing(
    run_distributed: Any, tmp_path: Path, world_size: int
) -> None:
    assert run_distributed(outlives_children, world_size, str(tmp_path)) == [[(True, [])] * 2] * world_size
