"""Loops that resume: those that rely on the loader's position, and those that skip by themselves what is behind it.

The oracle is the run that was not interrupted; a loop that skips twice ends before its first step.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, skip_first_batches
from lockstep.errors import UsageError
from lockstep.runtime import end_runtime
from tests.data.helpers import Stream

ROWS, BEHIND = 40, 3


def data(kind: str, ranks: int = 1) -> DataLoader[Any]:
    """Ten batches for each rank."""
    rows = torch.arange(float(ROWS * ranks)).unsqueeze(1)
    if kind == "shuffled":
        return DataLoader(TensorDataset(rows), batch_size=4, shuffle=True)
    return DataLoader(Stream(ROWS * ranks), batch_size=4)


def rows_in(batch: Any) -> torch.Tensor:
    rows = batch[0] if isinstance(batch, list) else batch
    return rows.float().view(-1, 1)


class Training:
    """A script: one model, one loader, one loop."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1e-5), data(kind, self.accelerator.num_processes)
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


def skips_first_batches(script: Training) -> None:
    for batch in skip_first_batches(script.loader, BEHIND):
        script.train(batch)


def with_a_plain_backward(script: Training) -> None:
    for batch in script.loader:
        script.model(rows_in(batch)).square().mean().backward()
        script.optimizer.step()
        script.optimizer.zero_grad()
        script.trained.append(rows_in(batch).flatten().tolist())


def read_ahead_by_one(script: Training) -> None:
    batches = iter(script.loader)
    following = next(batches, None)
    while following is not None:
        batch, following = following, next(batches, None)
        script.train(batch)


RIGHT: list[Callable[[Training], None]] = [
    from_position,
    skips_first_batches,
    with_a_plain_backward,
    read_ahead_by_one,
]


def by_continue(script: Training, skipped: int = BEHIND) -> None:
    for step, batch in enumerate(script.loader):
        if step < skipped:
            continue
        script.train(batch)


def after_a_move(script: Training) -> None:
    for step, batch in enumerate(script.loader):
        rows = rows_in(batch).to("cpu", torch.float64).contiguous()
        if step < BEHIND or rows.size(0) == 0:
            continue
        script.train(batch)


def by_next(script: Training) -> None:
    batches = iter(script.loader)
    for _ in range(BEHIND):
        next(batches)
    for batch in batches:
        script.train(batch)


def by_islice(script: Training) -> None:
    for batch in itertools.islice(script.loader, BEHIND, None):
        script.train(batch)


def behind_a_layer_of_its_own(script: Training) -> None:
    layer = nn.Linear(1, 1)
    for step, batch in enumerate(script.loader):
        layer(rows_in(batch))
        if step >= BEHIND:
            script.train(batch)


def before_a_plain_backward(script: Training) -> None:
    for step, batch in enumerate(script.loader):
        if step < BEHIND:
            continue
        script.model(rows_in(batch)).square().mean().backward()
        script.optimizer.step()


WRONG: list[Callable[[Training], None]] = [
    *(by_continue, after_a_move, by_next, by_islice, behind_a_layer_of_its_own, before_a_plain_backward),
]


def resumed(directory: str, kind: str) -> list[str]:
    """Of each loop what is not as it should be."""
    script = Training(kind)
    for step, batch in enumerate(script.loader):
        script.train(batch)
        if step + 1 == BEHIND:
            script.accelerator.save_state(directory)
    trained, weight = script.trained[BEHIND:], script.model.state_dict()
    wrong = []
    for loop in RIGHT:
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
    for loop in WRONG if kind == "shuffled" else ():
        script = Training(kind)
        script.accelerator.load_state(directory)
        before = {name: value.clone() for name, value in script.model.state_dict().items()}
        try:
            loop(script)
            wrong.append(f"{loop.__name__} trained on {script.trained}")
        except UsageError as error:
            if f"took {BEHIND} more before" not in str(error):
                wrong.append(str(error))
        if any(not torch.equal(before[name], value) for name, value in script.model.state_dict().items()):
            wrong.append(f"{loop.__name__} changed weights")
    end_runtime()
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_loop_trains_on_each_batch_once_or_is_refused(
    run_distributed: Any, world_size: int, tmp_path: Any
) -> None:
    for kind in ("shuffled", "stream")[: 3 - world_size]:
        folder = str(tmp_path / kind)
        assert run_distributed(resumed, world_size, folder, kind) == [[]] * world_size, kind


def with_next(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    while (batch := next(batches, None)) is not None:
        yield rows_in(batch).flatten().tolist()


LOOKS: list[Callable[[Any], Any]] = [
    lambda loader: [rows_in(batch).flatten().tolist() for batch in list(loader)],
    lambda loader: [rows_in(batch).flatten().tolist() for batch in itertools.islice(loader, ROWS)],
    lambda loader: list(with_next(loader)),
]


@pytest.mark.parametrize("kind", ["shuffled", "stream"])
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
    assert not caplog.records


def stopped_after(batches: int) -> Training:
    """A script that continues behind so many batches of ten."""
    script = Training("shuffled")
    for step, _ in enumerate(script.loader):
        if step == batches - 1:
            state = script.loader.state_dict()
    script.loader.load_state_dict(state)
    return script


def test_a_loop_that_skips_all_that_was_left_is_refused_in_the_next_epoch() -> None:
    script = stopped_after(6)
    with pytest.raises(UsageError, match="took 4 more before"):
        for _ in range(2):
            for step, batch in enumerate(script.loader):
                if step < 6 and script.loader.epoch < 2:
                    continue
                script.train(batch)
    assert script.trained == []


def test_a_loop_that_takes_a_few_batches_first_is_told_once(caplog: Any) -> None:
    script = stopped_after(3)
    with caplog.at_level(logging.WARNING):
        for step, batch in enumerate(script.loader):
            if step >= 1:
                script.train(batch)
        from_position(script)
    [record] = caplog.records
    assert "behind the 3 batches" in record.getMessage() and "took 1 more" in record.getMessage()


def test_an_evaluation_that_was_left_by_break_does_not_count_as_a_skip(caplog: Any) -> None:
    script = stopped_after(3)
    other = script.accelerator.prepare(data("shuffled"))
    for step, _ in enumerate(other):
        if step == 3:
            break
    other.load_state_dict(other.state_dict())
    with caplog.at_level(logging.WARNING):
        for batch in script.loader:
            script.train(batch)
            assert len([rows for [rows] in other if script.model(rows) is not None]) in (6, 10)
    assert not caplog.records and len(script.trained) == 7
