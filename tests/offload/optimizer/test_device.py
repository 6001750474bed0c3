"""Parameters of a device stepped on the host: all of it but the device, by copies that happen as late as they may."""

from __future__ import annotations

import copy
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.offload import Copies
from lockstep.offload.files import region_of
from lockstep.offload.optimizer import offload_step
from tests.offload.optimizer.test_offloaded import (
    OPTIMIZERS,
    Model,
    announce,
    assert_same,
    batches,
    groups_of,
    loss_of,
    moved_bytes,
    train,
)

CPU = torch.device("cpu")


class LateCopies(Copies):
    """Copies as on a side stream that runs only when somebody waits for it: what nobody waits for never comes."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.given: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0
        self.lock = threading.Lock()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self.lock:
            self.given.append((target, source))

    def copied(self) -> int:
        return len(self.given)

    def wait(self, event: int) -> None:
        with self.lock, torch.no_grad():
            while self.done < event:
                target, source = self.given[self.done]
                target.copy_(source)
                self.given[self.done] = (torch.empty(0), torch.empty(0))
                self.done += 1

    def compute_after(self, event: int) -> None:
        self.wait(event)


@pytest.mark.parametrize("place", ["ram", "disk"])
@pytest.mark.parametrize(
    "name", ["adamw", "sgd-nesterov", "adagrad", "adam-maximize-tensor-lr", "adamw-fused"]
)
def test_training_is_the_same_to_the_last_bit(name: str, place: str, tmp_path: Path) -> None:
    folder = tmp_path if place == "disk" else None
    plain = train(OPTIMIZERS[name], None, set_to_none=place == "ram", load_at=3)
    ours = train(
        OPTIMIZERS[name],
        lambda o, groups: offload_step(o, groups, folder, device=CPU, copies=LateCopies()),
        set_to_none=place == "ram",
        load_at=3,
    )
    assert_same(plain, ours)


def run(copies: Any, folder: Path | None) -> Any:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = None
    if copies is not None:
        groups = groups_of(model)
        step = offload_step(optimizer, groups, folder, copies=copies)
        announce(groups, step)
    for index, tokens in enumerate(batches(6)):
        loss_of(model, tokens).backward()
        if index % 2:  # windows of two micro-batches
            if index != 3:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        if index == 3:
            model.load_state_dict(copy.deepcopy(model.state_dict()))
            with torch.no_grad():
                model.blocks[0].linear.weight.mul_(0.5)
    if step is not None:
        step.finish()
        files = [region_of(value) for state in optimizer.state.values() for value in state.values()]
        assert any(files) == (folder is not None)
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


@pytest.mark.parametrize("place", ["ram", "disk"])
def test_windows_clipping_and_edited_parameters(place: str, tmp_path: Path) -> None:
    folder = tmp_path if place == "disk" else None
    plain = run(None, None)
    for copies in (LateCopies(), Copies(CPU)):  # those that see every later change of their source, and none
        assert_same(plain, run(copies, folder))


def test_gradients_travel_while_backward_runs_and_only_once() -> None:
    model = Model()
    copies = LateCopies()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = offload_step(optimizer, groups_of(model), copies=copies)
    loss_of(model, next(batches())).backward()
    stepped = sum(p.grad is not None for p in model.parameters())
    assert len(copies.given) == stepped
    optimizer.step()
    step.finish()
    assert len(copies.given) == 2 * stepped  # and the parameters back


def test_copies_of_parameters_on_disk_move_the_bytes_of_the_formula(tmp_path: Path) -> None:
    model = Model(width=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = offload_step(optimizer, groups_of(model), tmp_path, copies=LateCopies())
    _, padded, moved = moved_bytes(model, optimizer, step)
    assert [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(moved)] == [(3 * padded, 3 * padded)] * 2


def test_an_optimizer_that_looks_at_all_parameters_is_refused() -> None:
    with pytest.raises(UsageError, match="LBFGS"):
        offload_step(torch.optim.LBFGS(Model().parameters()), [], copies=Copies(CPU))
