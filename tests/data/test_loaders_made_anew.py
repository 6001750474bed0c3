"""Loaders that a script makes in each epoch, or after load_state: the run goes on where it was.

The oracle is the run that was not interrupted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep import Accelerator, skip_first_batches
from lockstep.errors import CheckpointError
from lockstep.runtime import end_runtime

ROWS, EPOCHS = 16, 3


def loader_of(seed: int, rows: int = ROWS) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(torch.arange(float(rows)).view(-1, 1), batch_size=2, shuffle=True, generator=generator)  # type: ignore[arg-type]


class Script:
    """Trains, and stops after so many steps; what it saw is in ``seen``."""

    def __init__(self, folder: str, stop: int | None, resumed: int) -> None:
        self.accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1)
        self.model, self.optimizer = self.accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1e-4)
        )
        self.folder, self.stop, self.steps = folder, stop, resumed
        self.seen: list[Any] = []

    def train(self, loader: Any) -> bool:
        """Whether it stops here."""
        for batch in loader:
            self.accelerator.backward(self.model(batch).mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.seen.append(self.accelerator.gather(batch).flatten().tolist())
            self.steps += 1
            if self.steps == self.stop:
                self.accelerator.save_state(self.folder)
                return True
        return False

    def look(self, loader: Any) -> None:
        # In any order: one that is made anew gets the generator of the one before.
        self.seen.append(sum(float(self.accelerator.gather_for_metrics(batch).sum()) for batch in loader))

    @property
    def epochs(self) -> range:
        return range(self.steps // (ROWS // 2 // self.accelerator.num_processes), EPOCHS)


def anew_in_each_epoch(script: Script, resume: bool) -> None:
    if resume:
        script.accelerator.load_state(script.folder)
    for epoch in script.epochs:
        if script.train(script.accelerator.prepare(loader_of(epoch))):
            return


def with_another_for_evaluation(script: Script, resume: bool) -> None:
    if resume:
        script.accelerator.load_state(script.folder)
    for epoch in script.epochs:
        training = script.accelerator.prepare(loader_of(epoch))
        if script.train(training):
            return
        evaluation = script.accelerator.prepare(loader_of(0, rows=12))
        script.look(evaluation)


def partly_prepared_after_loading(script: Script, resume: bool) -> None:
    training = script.accelerator.prepare(loader_of(0))
    if resume:
        script.accelerator.load_state(script.folder)
    evaluation = script.accelerator.prepare(loader_of(1, rows=12))
    for _ in script.epochs:
        if script.train(training):
            return
        script.look(evaluation)


def held_without_its_beginning(script: Script, resume: bool) -> None:
    loader = skip_first_batches(script.accelerator.prepare(loader_of(0)), 0)
    gc.collect()
    if resume:
        script.accelerator.load_state(script.folder)
    for _ in script.epochs:
        if script.train(loader):
            return


LOOPS: list[Callable[[Script, bool], None]] = [
    anew_in_each_epoch,
    with_another_for_evaluation,
    partly_prepared_after_loading,
    held_without_its_beginning,
]


def interrupted(folder: str) -> list[str]:
    wrong = []
    for loop in LOOPS:
        whole = Script(folder, None, 0)
        loop(whole, False)
        per_epoch = ROWS // 2 // whole.accelerator.num_processes
        for stop in (1, per_epoch + 1):
            place = f"{folder}/{loop.__name__}{stop}"
            first = Script(place, stop, 0)
            loop(first, False)
            second = Script(place, None, stop)
            loop(second, True)
            if first.seen + second.seen != whole.seen:
                wrong.append(f"{loop.__name__} {stop}: {first.seen} + {second.seen}, not {whole.seen}")
    end_runtime()
    return wrong


def test_such_a_run_can_be_resumed(run_distributed: Any, tmp_path: Any) -> None:
    assert run_distributed(interrupted, 2, str(tmp_path)) == [[]] * 2


def test_a_state_of_other_data_is_not_given_to_a_loader(tmp_path: Any) -> None:
    script = Script(str(tmp_path / "saved"), 1, 0)
    anew_in_each_epoch(script, False)
    resumed = Script(str(tmp_path / "saved"), None, 0)
    resumed.accelerator.load_state(resumed.folder)
    assert len(list(resumed.accelerator.prepare(loader_of(0, rows=12)))) == 6
    assert len(list(resumed.accelerator.prepare(loader_of(0)))) == 7


def test_more_loaders_than_were_saved_are_refused(tmp_path: Any) -> None:
    script = Script(str(tmp_path / "saved"), 1, 0)
    anew_in_each_epoch(script, False)
    resumed = Script(str(tmp_path / "saved"), None, 0)
    loaders = [resumed.accelerator.prepare(loader_of(0)) for _ in range(2)]
    with pytest.raises(CheckpointError, match="1 loader, but this run has .* 2 loader"):
        resumed.accelerator.load_state(resumed.folder)
    assert len(loaders) == 2


def test_a_loader_that_nobody_holds_is_forgotten() -> None:
    accelerator = Accelerator(cpu=True)
    plain = loader_of(0)
    loader = accelerator.prepare(plain)
    assert len(accelerator._dataloaders) == 1 and accelerator.prepare(loader) is loader
    del loader
    assert accelerator._dataloaders == []
    assert len(list(accelerator.prepare(plain))) == 8
