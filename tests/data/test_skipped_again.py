"""Loops that resume: those that rely on the loader's position, and those that skip by themselves what is behind it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from lockstep import Accelerator, skip_first_batches
from lockstep.runtime import end_runtime
from tests.data.helpers import Stream

ROWS, BEHIND = 40, 3


def data(kind: str) -> DataLoader[Any]:
    rows = torch.arange(float(ROWS)).unsqueeze(1)
    if kind == "shuffled":
        return DataLoader(TensorDataset(rows), batch_size=4, shuffle=True)
    if kind == "dictionaries":
        return DataLoader([{"row": row, "name": str(float(row))} for row in rows], batch_size=4)  # type: ignore[arg-type]
    if kind == "one tensor":
        return DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    return DataLoader(Stream(ROWS), batch_size=4)


def rows_in(batch: Any) -> torch.Tensor:
    rows = batch["row"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch
    return rows.float().view(-1, 1)


class Training:
    """A script: one model, one loader, one loop."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1e-4), data(kind)
        )
        self.trained: list[list[float]] = []

    def train(self, batch: Any) -> None:
        rows = rows_in(batch)
        self.accelerator.backward(self.model(rows).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.trained.append(rows.flatten().tolist())


def from_position(script: Training) -> None:
    for batch in script.loader:
        script.train(batch)


def skips_again(script: Training) -> None:
    for step, batch in enumerate(script.loader):
        if step < BEHIND:
            continue
        script.train(batch)


def skips_again_with_a_bar(script: Training) -> None:
    bar = tqdm(total=ROWS, disable=True)
    for step, batch in enumerate(tqdm(script.loader, disable=None)):
        if step < BEHIND:
            if step % 2 == 0:
                bar.update(1)
            continue
        with script.accelerator.accumulate(script.model):
            script.train(batch)


def trains_later_steps(script: Training) -> None:
    steps = 0
    for batch in script.loader:
        steps = steps + 1
        if steps > BEHIND:
            script.train(batch)


def skips_first_batches(script: Training) -> None:
    for batch in skip_first_batches(script.loader, BEHIND):
        script.train(batch)


LOOPS: list[Callable[[Training], None]] = [
    from_position,
    skips_again,
    skips_again_with_a_bar,
    trains_later_steps,
    skips_first_batches,
]


def resumed(directory: str, kind: str) -> list[str]:
    """Of each loop what differs from a run that was not stopped."""
    script = Training(kind)
    for step, batch in enumerate(script.loader):
        script.train(batch)
        if step + 1 == BEHIND:
            script.accelerator.save_state(directory)
    trained, weight = script.trained[BEHIND:], script.model.state_dict()
    wrong = []
    for loop in LOOPS:
        script = Training(kind)
        script.accelerator.load_state(directory)
        loop(script)
        again = script.model.state_dict()
        if script.trained != trained or not all(torch.equal(weight[name], again[name]) for name in weight):
            wrong.append(f"{loop.__name__} trained on {script.trained}, not on {trained}")
        script.trained = []
        from_position(script)  # the next epoch is a whole one
        if len(script.trained) != len(trained) + BEHIND:
            wrong.append(f"{loop.__name__} has {len(script.trained)} batches in its second epoch")
    end_runtime()
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_loop_trains_on_each_batch_once(run_distributed, world_size: int, tmp_path: Any) -> None:
    for kind in ("shuffled", "dictionaries", "one tensor", "stream"):
        folder = str(tmp_path / kind)
        assert run_distributed(resumed, world_size, folder, kind) == [[]] * world_size, kind


def counted(loader: Any) -> Iterator[int]:
    yield sum(1 for _ in loader)


def with_next(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    while (batch := next(batches, None)) is not None:
        yield rows_in(batch).flatten().tolist()


def with_a_branch(loader: Any) -> Iterator[Any]:
    for number, batch in enumerate(loader):
        if number > ROWS:
            break
        yield rows_in(batch).flatten().tolist()


def collected(loader: Any) -> list[Any]:
    kept = []
    for batch in loader:
        if batch is None:
            continue
        kept.append(batch)
    return [rows_in(batch).flatten().tolist() for batch in kept]


def parts_collected(loader: Any) -> list[Any]:
    kept = []
    for batch in loader:
        if batch is None:
            continue
        kept.append(batch["row"] if isinstance(batch, dict) else batch)
    return [rows_in(batch).flatten().tolist() for batch in kept]


LOOKS: list[Callable[[Any], Any]] = [
    lambda loader: [rows_in(batch).flatten().tolist() for batch in list(loader)],
    lambda loader: [rows_in(batch).flatten().tolist() for batch in loader],
    lambda loader: [rows_in(batch).flatten().tolist() for batch in tuple(loader)],
    lambda loader: [rows_in(batch).flatten().tolist() for batch in itertools.islice(loader, ROWS)],
    lambda loader: [
        rows_in(batch).flatten().tolist() for batch in [one for one in loader if one is not None]
    ],
    lambda loader: list(with_next(loader)),
    lambda loader: list(with_a_branch(loader)),
    collected,
    parts_collected,
]


@pytest.mark.parametrize("kind", ["shuffled", "dictionaries", "one tensor", "stream"])
def test_loops_that_only_look_see_each_batch_once(kind: str, caplog: Any) -> None:
    script = Training(kind)
    rest: list[list[float]] = []
    for step, batch in enumerate(script.loader):
        if step == BEHIND - 1:
            state = script.loader.state_dict()
        elif step >= BEHIND:
            rest.append(rows_in(batch).flatten().tolist())
    with caplog.at_level(logging.WARNING):
        for number, look in enumerate(LOOKS):
            script.loader.load_state_dict(state)
            assert look(script.loader) == rest, number
        script.loader.load_state_dict(state)
        assert list(counted(script.loader)) == [len(rest)]
    assert not caplog.records


def test_a_skipping_loop_is_told_once(caplog: Any) -> None:
    script = Training("shuffled")
    for step, _ in enumerate(script.loader):
        if step == BEHIND - 1:
            state = script.loader.state_dict()
    script.loader.load_state_dict(state)
    with caplog.at_level(logging.WARNING):
        skips_again(script)
    [record] = caplog.records
    assert "continues after 3 batches by itself" in record.getMessage()
