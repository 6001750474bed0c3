"""Positions of loaders that rank 0 reads for all ranks, in real processes; the oracle is the order as a list."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep import DataLoaderConfiguration
from lockstep.comm import Communicator
from lockstep.data import prepare_loader
from lockstep.data_loader import PreparedLoader
from lockstep.errors import CheckpointError
from lockstep.runtime import StepState, end_runtime, start_runtime
from tests.data.helpers import Numbers, SizedStream, Stream, consume, shuffled
from tests.data.test_resume import advance, samples_in, states_for

SEED = 3
KINDS = {
    "map": (lambda w: DataLoader(Numbers(31), 2, shuffle=True), {"dispatch_batches": True}),
    "stream": (lambda w: DataLoader(Stream(31), 2), {}),
    "split stream": (lambda w: DataLoader(Stream(31), 4), {"split_batches": True}),
    "striped stream": (lambda w: DataLoader(Stream(31, striped=True), 2, num_workers=1), {}),
}


def prepared(name: str) -> PreparedLoader:
    runtime = start_runtime(cpu=True)
    make, options = KINDS[name]
    return prepare_loader(
        make(runtime.world_size),
        runtime=runtime,
        step=StepState(),
        config=DataLoaderConfiguration(data_seed=SEED, **options),
        communicator=Communicator(runtime),
        device=runtime.device,
    )


def stopped(stops: list[tuple[str, int]]) -> list[Any]:
    """For each kind and number of steps: the batches received, the position, and the rest of the epoch."""
    results = []
    for name, steps in stops:
        loader = prepared(name)
        seen, loop = advance(loader, steps)
        results.append((seen, loader.state_dict(), list(range(sum(1 for _ in loop)))))
    end_runtime()
    return results


def continued(runs: list[tuple[str, list[Any]]]) -> list[Any]:
    rank = start_runtime(cpu=True).rank
    results = []
    for name, states in runs:
        loader = prepared(name)
        loader.load_state_dict(states[rank])
        results.append(consume(loader))
    end_runtime()
    return results


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
def test_dispatched_data_comes_exactly_once_wherever_a_run_stops(run_distributed, before, after):
    draw = random.Random(f"{before} {after}")
    quick = [name for name in KINDS if name != "striped stream"]
    stops = [(name, draw.randrange(1, 8 // before)) for name in quick for _ in range(3)]
    if (before, after) == (2, 1):  # starting worker processes takes seconds here
        stops.append(("striped stream", 2))
    ranks = run_distributed(stopped, before, stops)
    positions = [
        (name, states_for(after, [results[i][1] for results in ranks])) for i, (name, _) in enumerate(stops)
    ]
    later = run_distributed(continued, after, positions)
    for i, (name, _) in enumerate(stops):
        behind = samples_in([results[i][0] for results in ranks])
        rest = samples_in([results[i] for results in later])
        order = shuffled(31, SEED) if name == "map" else list(range(31))
        if name == "striped stream":
            assert sorted(behind + rest) == order
        else:
            assert behind + rest == order
        if before == after:
            assert len(later[0][i]) == len(ranks[0][i][2])


def of_another_length() -> str:
    runtime = start_runtime(cpu=True)
    length = 40 if runtime.rank == 0 else 17  # only rank 0 needs the data
    loader = prepare_loader(
        DataLoader(SizedStream(length), 2),
        runtime=runtime,
        step=StepState(),
        config=DataLoaderConfiguration(),
        communicator=Communicator(runtime),
    )
    next(iter(loader))
    state = loader.state_dict()
    if runtime.rank:
        state["dataset_size"] = 40  # as rank 0 says in a changed world
        loader.load_state_dict(state)
    state["dataset_size"] = 41
    try:
        loader.load_state_dict(state)
    except CheckpointError as error:
        return str(error)
    finally:
        end_runtime()
    return "accepted"


def test_only_the_rank_that_reads_compares_lengths(run_distributed):
    main, other = run_distributed(of_another_length, 2)
    assert "of 41 samples, but this loader has one of 40" in main
    assert other == "accepted"


def synchronised() -> list[float]:
    runtime = start_runtime(cpu=True)
    torch.manual_seed(runtime.rank)

    def make() -> PreparedLoader:
        return prepare_loader(
            DataLoader(Numbers(8), 2),
            runtime=runtime,
            step=StepState(),
            config=DataLoaderConfiguration(),
            communicator=Communicator(runtime),
            rng_types=["torch"],
        )

    loader = make()
    batches = iter(loader)
    next(batches)
    torch.manual_seed(10 + runtime.rank)
    numbers = [torch.rand(()).item()]
    torch.manual_seed(10 + runtime.rank)
    other = make()
    other.load_state_dict(loader.state_dict())
    next(iter(other))
    numbers.append(torch.rand(()).item())
    end_runtime()
    return numbers


def test_generators_are_made_common_at_the_beginning_of_an_epoch_but_not_where_one_continues(run_distributed):
    for uninterrupted, resumed in run_distributed(synchronised, 2):
        assert uninterrupted == resumed
