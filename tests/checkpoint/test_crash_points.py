"""A run that is killed, loses its power or meets a broken disk while it saves continues from a whole checkpoint."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from checkpoint.crash import sabotage, trials
from checkpoint.crash.crashes import Outcome
from checkpoint.crash.lost_writes import Disk
from checkpoint.crash.operations import Operation
from checkpoint.crash.trials import TRIALS, Trial, make
from lockstep.testing import server_environment


@pytest.fixture(scope="module")
def executor() -> Iterator[ProcessPoolExecutor]:
    with server_environment():  # in case that this test is the first to start the server
        executor = trials.pool(multiprocessing.get_context("forkserver"))
        executor.submit(os.getpid).result()
    with executor:
        yield executor


def results(outcomes: list[Outcome]) -> Counter[str]:
    assert [one for one in outcomes if not one.is_right] == []
    return Counter(one.result for one in outcomes)


def made(executor: ProcessPoolExecutor, kind: object, slices: int, ranks: int = 1) -> list[Outcome]:
    chosen = [trial for trial in TRIALS if trial.kind is kind and trial.scenario.ranks == ranks]
    return [one for _, outcomes in make(executor, chosen, slices, taken=1) for one in outcomes]


def test_a_run_that_is_killed_anywhere_continues_at_the_save_or_the_one_before(executor) -> None:
    numbered = Trial(trials.killed, trials.LIMIT_1)
    found = results([one for _, outcomes in make(executor, [numbered], 4, 1) for one in outcomes])
    assert found.total() >= 45
    assert min(found["N"], found["N-1"], found["none"]) > 0


def test_so_does_one_that_saves_in_another_way(executor) -> None:
    found = results(made(executor, trials.killed, slices=30))
    assert found.total() >= 30
    assert min(found["N"], found["N-1"], found["none"]) > 0


def test_the_run_that_resumes_may_be_killed_too(executor) -> None:
    found = results(made(executor, trials.killed_twice, slices=40))
    assert found.total() >= 10
    assert min(found["N"], found["N-1"]) > 0


@pytest.mark.parametrize(("ranks", "slices"), [(1, 50), (2, 90)])
def test_a_rank_that_a_signal_ends_leaves_a_whole_checkpoint(executor, ranks: int, slices: int) -> None:
    found = made(executor, trials.really_killed, slices, ranks)
    assert results(found).total() >= 2 * ranks
    assert {one.point.split(",")[0] for one in found} == {f"rank {rank}" for rank in range(ranks)}


def test_what_was_not_synced_may_be_lost(executor) -> None:
    found = results(made(executor, trials.power_off, slices=100))
    assert min(found["N"], found["N-1"], found["none"]) > 0


def test_a_broken_disk_fails_the_save_and_nothing_else(executor) -> None:
    found = results(made(executor, trials.failed, slices=64))
    assert min(found["N"], found["N-1"]) > 0


def test_a_broken_disk_of_one_rank_fails_the_save_on_both(executor) -> None:
    assert results(made(executor, trials.failed, 120, ranks=2)).total() >= 4


@pytest.mark.parametrize(
    ("broken", "kind", "seen"),
    [
        (sabotage.prunes_first, trials.killed, {"unreadable"}),
        (sabotage.syncs_nothing, trials.power_off, {"unreadable"}),
    ],
)
def test_the_harness_finds_what_is_wrong_with_a_careless_writer(executor, broken, kind, seen) -> None:
    found = executor.submit(sabotage.outcomes, broken, kind).result()
    assert seen <= {one.result for one in found}


def after(*operations: Operation) -> list[dict[str, bytes | None]]:
    disk = Disk()
    for operation in operations:
        disk.do(operation)
    return list(disk.after_power_failure())


def test_a_file_that_is_not_synced_may_be_empty_zeros_or_there() -> None:
    written = (Operation("open", "a"), Operation("sync", "."), Operation("write", "a", data=b"xy"))
    assert after(*written) == [{"a": b""}, {"a": b"xy"}, {"a": b"\0\0"}]
    assert after(*written, Operation("sync", "a")) == [{"a": b"xy"}]


def test_a_synced_file_may_have_no_name_until_its_folder_is_synced() -> None:
    written = (Operation("open", "a"), Operation("write", "a", data=b"xy"), Operation("sync", "a"))
    assert after(*written) == [{}, {"a": b"xy"}]
    assert after(*written, Operation("sync", ".")) == [{"a": b"xy"}]


def test_changes_of_a_folder_are_lost_from_the_last_on() -> None:
    made = (
        Operation("mkdir", "a"),
        Operation("sync", "."),
        Operation("rename", "a", to="b"),
        Operation("mkdir", "c"),
    )
    assert after(*made) == [{"a": None}, {"b": None}, {"b": None, "c": None}]


def test_folders_are_independent() -> None:
    made = (Operation("mkdir", "a"), Operation("open", "a/x"), Operation("sync", "a"), Operation("sync", "."))
    gone = (Operation("rename", "a", to="b"), Operation("unlink", "b/x"))
    assert {frozenset(tree) for tree in after(*made, *gone)} == {
        frozenset(names) for names in (["a", "a/x"], ["b", "b/x"], ["a"], ["b"])
    }
