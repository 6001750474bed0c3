"""A save in the background writes the bytes that a blocking one writes, whatever is done to the state meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lockstep import Accelerator
from lockstep.checkpoint import save
from lockstep.checkpoint.deferred import SMALL_BYTES, DeferredCopies, FrozenTensor
from lockstep.checkpoint.store.local import LocalStore
from lockstep.comm.dtensor import local
from lockstep.errors import LockstepError
from tests.marks import again

WIDTH, LARGE = 8, SMALL_BYTES // 4 + 100
"""``LARGE`` elements are more than is copied at once."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(x)))


class Net(nn.Module):
    """Blocks and, with ``has_buffers``, what a forward changes: a small buffer of BatchNorm and a large one."""

    def __init__(self, has_buffers: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm = nn.BatchNorm1d(WIDTH) if has_buffers else nn.Identity()
        if has_buffers:
            self.register_buffer("seen", torch.zeros(LARGE))
        self.has_buffers = has_buffers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        if self.has_buffers:
            self.seen += 1
        return self.norm(x)


class Sums:
    """A registered object whose tensor is too large to be copied at once."""

    def __init__(self, rank: int) -> None:
        self.sums = torch.full((LARGE,), float(rank))

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = state["sums"].clone()


class Run:
    """``divided``: the model is one of which ranks have parts, and has no buffers."""

    def __init__(self, parallel: str | None, precision: str = "no", window: int = 1) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.accelerator = Accelerator(
            cpu=True, parallel=parallel, mixed_precision=precision, gradient_accumulation_steps=window
        )
        self.divided = any(word in (parallel or "") for word in ("tp", "pp"))
        model = Net(not self.divided)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        self.average = None if self.divided else AveragedModel(model)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        self.sums = Sums(self.accelerator.process_index)
        self.accelerator.register_for_checkpointing(self.sums)
        if self.average is not None:
            self.accelerator.register_for_checkpointing(self.average)

    def backward(self) -> None:
        with self.accelerator.accumulate(self.model):
            loss = self.model(torch.randn(4, WIDTH)).square().mean()
            self.accelerator.backward(loss)
            self.step()

    def step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.sums.sums += 1
        if self.average is not None:
            for value in self.average.parameters():
                value.data.mul_(0.9)

    def tensors(self) -> list[torch.Tensor]:
        """All that a checkpoint has of this rank."""
        plain = self.accelerator.unwrap_model(self.model)
        found = [*plain.parameters(), *plain.buffers(), self.sums.sums]
        found += [p.grad for p in plain.parameters() if p.grad is not None]
        found += [value for values in self.optimizer.state.values() for value in values.values()]
        return found + ([] if self.average is None else list(self.average.parameters()))


def content(directory: str | Path) -> dict[str, bytes]:
    """All but the manifest, which tells the time."""
    return {path.name: path.read_bytes() for path in Path(directory).iterdir() if path.name != "manifest.json"}


@contextmanager
def held(name: str = "copy", of: Any = DeferredCopies) -> Iterator[threading.Event]:
    """The thread that saves stops before this function until the event is set; the main thread passes."""
    release, original = threading.Event(), getattr(of, name)

    def function(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            release.wait()
        return original(*args)

    with mock.patch.object(of, name, function):
        try:
            yield release
        finally:
            release.set()


def by_hand(run: Run) -> None:
    """Ways to change a tensor, most of which no version counter tells."""
    ways: list[Callable[[torch.Tensor], object]] = [
        lambda tensor: tensor.data.fill_(7),
        lambda tensor: tensor.detach().numpy().fill(7),
        lambda tensor: tensor.detach().zero_(),
        lambda tensor: tensor.data.copy_(torch.full_like(tensor.data, 7)),
        lambda tensor: tensor.detach().view(-1)[:1].add_(7),
    ]
    with torch.no_grad():
        for number, tensor in enumerate(run.tensors()):
            part = local(tensor)
            if part.numel():
                ways[number % len(ways)](part)


def trains(run: Run) -> None:
    for _ in range(2):
        run.backward()


CHANGES = {"by hand": by_hand, "trains": trains}


def saves_alike(directory: str, parallel: str | None, options: dict[str, Any], open_at: int) -> list[Any]:
    """For each way to change the state: whether the bytes are those of a blocking save, and of the state as it was."""
    run = Run(parallel, **options)
    for _ in range(2 * options.get("window", 1) + open_at):
        run.backward()
    found = []
    rounds = [("first", "trains"), ("later", "trains"), ("later", "by hand"), ("first", "by hand")]
    for number, (kind, change) in enumerate(rounds):
        place = f"{directory}/{number}"
        if kind == "first":
            run.accelerator._checkpointer.planner._plan = None
        run.accelerator.wait_for_everyone()
        with held() as copies, held("plan_files", of=save) as planning:
            run.accelerator.save_state(f"{place}-background", blocking=False)
            at_once = run.accelerator._checkpointer.background.copies.bytes_at_once  # type: ignore[union-attr]
            before = [local(tensor).clone() for tensor in run.tensors()]
            if change == "trains":
                planning.set()
            CHANGES[change](run)
            planning.set()
            copies.set()
            run.accelerator.wait_for_checkpoint()
        changed = sum(
            not torch.equal(a, local(b)) for a, b in zip(before, run.tensors(), strict=False)
        )
        run.accelerator.load_state(f"{place}-background")
        now = [torch.equal(a, local(b)) for a, b in zip(before, run.tensors(), strict=False)]
        run.accelerator.save_state(f"{place}-blocking")
        found.append((at_once, changed, all(now)))
    return found


CASES = [
    (1, None, {}, 0),
    (1, None, {"precision": "fp16"}, 0),
    (1, "offload=optimizer", {}, 0),
    (1, None, {"window": 3}, 2),
    (2, None, {}, 0),
    (2, None, {"window": 3}, 1),
    (2, "zero=1", {}, 0),
    (2, "zero=2", {"window": 3}, 2),
    (2, "zero=3", {}, 0),
    (2, "tp=2", {}, 0),
    (2, "pp=2", {}, 0),
    again(2, "zero=3", {"window": 3}, 1),
    again(2, "zero=2", {"precision": "fp16"}, 0),
    again(2, "zero=3 offload=optimizer", {}, 0),
    again(4, "zero=2 replicate=2", {}, 0),
    again(4, "zero=3 tp=2", {}, 0),
    again(4, None, {"window": 2}, 1),
]


@pytest.mark.parametrize(("world_size", "parallel", "options", "open_at"), CASES)
def test_the_bytes_are_those_of_a_blocking_save_of_the_same_state(
    run_distributed: Any,
    tmp_path: Path,
    world_size: int,
    parallel: str | None,
    options: dict[str, Any],
    open_at: int,
) -> None:
    ranks = run_distributed(saves_alike, world_size, str(tmp_path), parallel, options, open_at)
    for found in ranks:
        for at_once, changed, is_as_it_was in found:
            assert at_once < SMALL_BYTES
            assert changed > 8
            assert is_as_it_was
    for number in range(4):
        background, blocking = (content(tmp_path / f"{number}-{kind}") for kind in ("background", "blocking"))
        assert background.keys() == blocking.keys()
        assert [name for name in background if background[name] != blocking[name]] == []
