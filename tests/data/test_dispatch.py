"""Rank 0 reads for all, in real processes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lockstep import Accelerator, DataLoaderConfiguration, skip_first_batches
from lockstep.comm import Communicator
from lockstep.data import prepare_loader
from lockstep.data_loader import PreparedLoader, prepare_data_loader
from lockstep.errors import LockstepError
from lockstep.runtime import StepState, end_runtime, start_runtime
from tests.data.helpers import Numbers, Stream, chunks, consume, rows_of


def prepare(loader: DataLoader[Any], rng_types: list[str] | None = None, **options: Any) -> PreparedLoader:
    runtime = start_runtime(cpu=True)
    return prepare_loader(
        loader,
        runtime=runtime,
        step=StepState(),
        config=DataLoaderConfiguration(**options),
        communicator=Communicator(runtime),
        device=runtime.device,
        rng_types=rng_types,
    )


class OnlyOnRankZero(Stream):
    def __iter__(self):
        assert os.environ["RANK"] == "0", "only rank 0 may read"
        return super().__iter__()


class OnlyNumbersOnRankZero(Numbers):
    def __getitem__(self, index):
        assert os.environ["RANK"] == "0", "only rank 0 may read"
        return index


def stream_batches(n: int, batch_size: int, split: bool, workers: int, skipped: int = 0) -> list[Any]:
    loader = DataLoader(OnlyOnRankZero(n), batch_size=batch_size, num_workers=workers)
    batches = consume(skip_first_batches(prepare(loader, split_batches=split), skipped))  # type: ignore[arg-type]
    end_runtime()
    return batches


def joined(ranks: list[list[Any]]) -> list[list[int]]:
    """The samples of each step in rank order, by the counts that every rank was told."""
    steps = []
    for batches in zip(*ranks, strict=True):
        assert len({counts for _, counts, _ in batches}) == 1
        counts = batches[0][1]
        assert counts.rows == tuple(len(rows) for rows, _, _ in batches)
        steps.append(
            [row for (rows, _, _), real in zip(batches, counts.real, strict=True) for row in rows[:real]]
        )
        assert len({last for _, _, last in batches}) == 1
    assert [batches[2] for batches in ranks[0]] == [False] * (len(steps) - 1) + [True]
    return steps


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("split", [False, True])
def test_streams_are_dispatched_by_default(run_distributed, world, split):
    ranks = run_distributed(stream_batches, world, 22, 8 if split else 8 // world, split, 0)
    assert joined(ranks) == chunks(list(range(22)), 8)
    assert [[len(rows) for rows, _, _ in rank] for rank in ranks] == [
        [8 // world, 8 // world, -(-6 // world)]
    ] * world


def test_streams_are_dispatched_with_a_worker_process(run_distributed):
    assert joined(run_distributed(stream_batches, 2, 9, 2, False, 1)) == chunks(list(range(9)), 4)


def test_dispatched_batches_can_be_skipped(run_distributed):
    assert joined(run_distributed(stream_batches, 2, 9, 2, False, 0, 1)) == chunks(list(range(4, 9)), 4)


def shuffled_batches() -> list[Any]:
    torch.manual_seed(5 + start_runtime(cpu=True).rank)
    loader = DataLoader(OnlyNumbersOnRankZero(10), batch_size=2, shuffle=True)
    prepared = prepare(loader, dispatch_batches=True)
    batches = consume(prepared)
    assert len(prepared) == len(batches)
    assert prepared.epoch == 1
    end_runtime()
    return batches


def plain_order(n: int, seed: int) -> list[int]:
    """What ``shuffle=True`` gives in a process on its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [row for batch in DataLoader(Numbers(n), batch_size=2, shuffle=True) for row in rows_of(batch)]


def test_map_style_data_can_be_dispatched(run_distributed):
    assert joined(run_distributed(shuffled_batches, 2)) == chunks(plain_order(10, 5), 4)


def last_rounds(samples: int) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Of stream and map-style data, even or not: this rank's batches, and the metrics of all."""
    found = []
    for data in (Stream(samples), torch.arange(samples)):
        for even in (True, False):
            config = DataLoaderConfiguration(dispatch_batches=True, even_batches=even)
            accelerator = Accelerator(cpu=True, dataloader_config=config)
            batches, gathered = [], []
            for batch in accelerator.prepare(DataLoader(data, batch_size=4)):
                batches.append(batch.tolist())
                gathered.append(accelerator.gather_for_metrics(batch).tolist())
            found.append((batches, gathered))
    end_runtime()
    return found


@pytest.mark.parametrize("samples", [12, 11, 9, 1])
def test_what_is_left_for_the_last_round_is_cut_into_equal_slices(run_distributed, samples):
    rows = chunks(list(range(samples)), 8)
    each = [-(-len(left) // 2) for left in rows]
    slices = [
        [[*left, 0][rank * n : (rank + 1) * n] for left, n in zip(rows, each, strict=True)]
        for rank in range(2)
    ]
    for rank, found in enumerate(run_distributed(last_rounds, 2, samples)):
        assert found == [(slices[rank], rows)] * 4


def texts(rows: list[int]) -> dict[str, Any]:
    return {
        "rows": torch.tensor(rows),
        "half": torch.tensor(rows).half(),
        "texts": [str(row) for row in rows],
    }


def nested_batches() -> list[Any]:
    batches = list(prepare(DataLoader(Stream(4), batch_size=2, collate_fn=texts)))
    end_runtime()
    return [(b["rows"].tolist(), b["half"].dtype, b["texts"]) for b in batches]


def test_nested_batches_arrive_with_their_other_leaves(run_distributed):
    assert run_distributed(nested_batches, 2) == [
        [([0, 1], torch.float16, ["0", "1"])],
        [([2, 3], torch.float16, ["2", "3"])],
    ]


class Failing(IterableDataset):
    def __iter__(self):
        yield from range(4)
        raise OSError("disk gone")


def failing_batches() -> tuple[int, str, str]:
    seen = 0
    try:
        for _ in prepare(DataLoader(Failing(), batch_size=1)):
            seen += 1
    except (OSError, LockstepError) as error:
        end_runtime()
        return seen, type(error).__name__, str(error)
    raise AssertionError("no error")


def test_a_failure_while_rank_0_reads_reaches_every_rank(run_distributed):
    main, other = run_distributed(failing_batches, 2)
    assert main == (1, "OSError", "disk gone")
    assert other[:2] == (1, "LockstepError")
    assert "OSError: disk gone" in other[2]


def refused(samples_of_main: int, drop_last: bool = False) -> str:
    samples = samples_of_main if start_runtime(cpu=True).rank == 0 else 8
    try:
        prepare(DataLoader(Numbers(samples), drop_last=drop_last))
    except Exception as error:
        end_runtime()
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_a_loader_that_one_rank_refuses_is_refused_by_all(run_distributed):
    for text in run_distributed(refused, 2, 1, True):
        assert (
            "drop_last=True the loader has 1 full batches, which is less than one for each of 2 processes"
            in text
        )


def test_loaders_of_different_length_are_refused_by_all(run_distributed):
    for text in run_distributed(refused, 2, 6):
        assert "rank 1 has 8 batches of 8 samples, but rank 0 has 6 of 6" in text


def own_batches() -> list[Any]:
    rank = start_runtime(cpu=True).rank
    torch.manual_seed(rank)
    loader = prepare(DataLoader(Numbers(8), batch_size=2, shuffle=True), rng_types=["torch"])
    batches = [rows_of(batch) for batch in loader]
    number = torch.rand(()).item()
    end_runtime()
    return [batches, number]


def test_the_seed_and_the_asked_for_generators_are_those_of_rank_0(run_distributed):
    (first, number), (second, same_number) = run_distributed(own_batches, 2)
    assert [a + b for a, b in zip(first, second, strict=True)] == chunks(plain_order(8, 0), 4)
    assert number == same_number


def accelerate_style() -> list[list[int]]:
    start_runtime(cpu=True)
    loader = prepare_data_loader(DataLoader(Numbers(8), batch_size=4), split_batches=True, put_on_device=True)
    batches = [rows_of(batch) for batch in loader]
    end_runtime()
    return batches


def test_prepare_data_loader_takes_accelerates_arguments(run_distributed):
    assert run_distributed(accelerate_style, 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
