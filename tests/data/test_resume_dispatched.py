"""Positions of loaders that rank 0 reads for all ranks, in real processes; the oracle is the order as a list."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from lockstep.data_loader import PreparedLoader
from lockstep.errors import CheckpointError
from lockstep.runtime import end_runtime, start_runtime
from tests.data.helpers import Numbers, SizedStream
from tests.data.test_dispatch import prepare


def of_another_length() -> str:
    runtime = start_runtime(cpu=True)
    length = 40 if runtime.rank == 0 else 17  # only rank 0 needs the data
    loader = prepare(DataLoader(SizedStream(length), 2))
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
        return prepare(DataLoader(Numbers(8), 2), rng_types=["torch"])

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
