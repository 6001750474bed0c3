"""Samplers with random numbers or counters of their own: a run goes on in their order, or says that it cannot.

The oracle is the order that plain torch's loader gives in an uninterrupted run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lockstep import Accelerator
from lockstep.errors import CheckpointError
from lockstep.runtime import end_runtime
from tests.data.helpers import Numbers, rows_of

ROWS = 32


class Own:
    """Gives indices in an order of its own."""

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        return iter(self.order())

    def order(self) -> list[int]:
        raise NotImplementedError


class OwnNumpy(Own):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def order(self) -> list[int]:
        return self.rng.permutation(ROWS).tolist()


class OwnRandom(Own):
    def __init__(self) -> None:
        self.rng = random.Random(5)

    def order(self) -> list[int]:
        return self.rng.sample(range(ROWS), ROWS)


class Counting(Own):
    """Counts its epochs, each at the end."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += 1


class Unseeded(OwnNumpy):
    def __init__(self) -> None:
        self.rng = np.random.default_rng()


class OneByOne(OwnRandom):
    """Draws each index when it is asked for."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(ROWS))
        while left:
            yield left.pop(self.rng.randrange(len(left)))


class Keeping(OwnNumpy):
    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]


class KeepingLazily(OneByOne):
    def state_dict(self) -> dict[str, Any]:
        return {"state": list(self.rng.getstate()[1])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.setstate((3, tuple(state["state"]), None))


class ByEpoch(Own):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class InPairs:
    """A batch sampler."""

    def __init__(self, sampler: Own) -> None:
        self.sampler = sampler
        self.batch_size = 2
        self.drop_last = False

    def __len__(self) -> int:
        return ROWS // 2

    def __iter__(self) -> Iterator[list[int]]:
        rows = list(self.sampler)
        return iter([rows[i : i + 2] for i in range(0, ROWS, 2)])


REFUSED: list[type[Own]] = [Unseeded]
RIGHT: list[type[Own]] = [OwnNumpy, OneByOne, Counting, Keeping, KeepingLazily, ByEpoch]


def loader_of(kind: type[Own], in_pairs: bool) -> DataLoader[Any]:
    torch.manual_seed(0)
    if in_pairs:
        return DataLoader(Numbers(ROWS), batch_sampler=InPairs(kind()))  # type: ignore[arg-type]
    return DataLoader(Numbers(ROWS), batch_size=2, sampler=kind())


def plain_orders(kind: type[Own], in_pairs: bool) -> list[list[int]]:
    plain, orders = loader_of(kind, in_pairs), []
    for epoch in range(3):
        getattr(plain.sampler, "set_epoch", lambda _: None)(epoch)
        getattr(getattr(plain.batch_sampler, "sampler", None), "set_epoch", lambda _: None)(epoch)
        orders.append([row for batch in plain for row in rows_of(batch)])
    return orders


def rows_after(accelerator: Accelerator, loader: Any, steps: int | None = None) -> list[int]:
    """The samples of the next steps of all ranks, or of the rest of an epoch."""
    rows: list[int] = []
    for number, batch in enumerate(loader):
        rows += accelerator.gather_for_metrics(batch).tolist()
        if number + 1 == steps:
            break
    return rows


def stopped(kind: type[Own], in_pairs: bool, epoch: int, steps: int) -> tuple[Any, Any]:
    """The state of a loader that is stopped in this epoch, after so many steps, and that of torch's generator."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(loader_of(kind, in_pairs))
    for _ in range(epoch):
        rows_after(accelerator, loader)
    if steps:
        rows_after(accelerator, loader, steps)
    return loader.state_dict(), torch.get_rng_state()


def rest_after(kind: type[Own], in_pairs: bool, epoch: int, state: Any, generators: Any) -> Any:
    """The rest of the epochs after a position, or the sentence that refuses it."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(loader_of(kind, in_pairs))
    loader.load_state_dict(state)
    if generators is not None:
        torch.set_rng_state(generators)
    try:
        return [rows_after(accelerator, loader) for _ in range(3 - epoch)]
    except CheckpointError as error:
        return str(error)


CASES = [
    (kind, in_pairs, epoch, steps)
    for kind in REFUSED + RIGHT
    for in_pairs in (False, True)
    for epoch, steps in ((0, 2), (1, 1), (1, 0))
    # Between epochs nothing can tell an order that nobody can draw again.
    if (steps or kind in RIGHT) and not (in_pairs and kind in (KeepingLazily, Counting))
]


def all_continued(cases: list[Any]) -> list[Any]:
    found = [rest_after(*case[:3], *stopped(*case)) for case in cases]
    end_runtime()
    return found


def check(case: Any, ranks: int, found: Any) -> None:
    kind, in_pairs, epoch, steps = case
    if kind in REFUSED:
        assert "does not give the same first" in found, case
        return
    orders = plain_orders(kind, in_pairs)[epoch:]
    assert found == [orders[0][steps * 2 * ranks :], *orders[1:]], case


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_goes_on_in_the_order_of_its_sampler_or_is_refused(
    run_distributed: Any, world_size: int
) -> None:
    for results in run_distributed(all_continued, world_size, CASES):
        for case, found in zip(CASES, results, strict=True):
            check(case, world_size, found)


def all_stopped(cases: list[Any]) -> list[Any]:
    found = [stopped(*case) for case in cases]
    end_runtime()
    return found


def all_rests(cases: list[Any], states: list[Any]) -> list[Any]:
    # Another world: the states of rank 0, and no generators but those that the loader brings.
    found = [rest_after(*case[:3], state, None) for case, (state, _) in zip(cases, states, strict=True)]
    end_runtime()
    return found


@pytest.mark.parametrize(("saved", "here"), [(1, 2), (2, 1)])
def test_so_it_does_on_another_number_of_ranks(run_distributed: Any, saved: int, here: int) -> None:
    cases = [case for case in CASES if case[3] and case[0] in (OwnNumpy, Keeping)]
    states = run_distributed(all_stopped, saved, cases)[0]
    for results in run_distributed(all_rests, here, cases, states):
        for case, found in zip(cases, results, strict=True):
            check(case, saved, found)


def saved_and_loaded(folder: str) -> str:
    orders = plain_orders(Keeping, False)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(loader_of(Keeping, False))
    rows_after(accelerator, loader)
    rows_after(accelerator, loader, 1)
    accelerator.save_state(folder)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(loader_of(Keeping, False))
    accelerator.load_state(folder)
    behind = 2 * accelerator.num_processes
    rest = [rows_after(accelerator, loader), rows_after(accelerator, loader)]
    end_runtime()
    return "" if rest == [orders[1][behind:], orders[2]] else f"{rest}, not {orders}"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_has_the_state_of_a_sampler(
    run_distributed: Any, world_size: int, tmp_path: Any
) -> None:
    assert run_distributed(saved_and_loaded, world_size, str(tmp_path / "saved")) == [""] * world_size


def test_a_state_without_that_of_a_sampler_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(loader_of(OwnNumpy, False))
    next(iter(loader))
    other = accelerator.prepare(loader_of(Keeping, False))
    with pytest.raises(CheckpointError, match="0 samplers that have state_dict"):
        other.load_state_dict(loader.state_dict())
