"""Parameters of a device stepped on the host: all of it but the device, by copies that happen as late as they may."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.offload import Copies
from lockstep.offload.optimizer import offload_step
from tests.offload.optimizer.test_offloaded import (
    OPTIMIZERS,
    Model,
    assert_same,
    assert_same_with_offload,
    batches,
    groups_of,
    loss_of,
    moved_bytes,
    train,
)
from tests.offload.weights.device.late import LateCopies

CPU = torch.device("cpu")


class KeptCopies(LateCopies):
    """As late, and with their memory kept until the end, as a device's stream has it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.kept += [target, source]
        super().copy(target, source)


@pytest.mark.parametrize("place", ["ram", "disk"])
@pytest.mark.parametrize(
    "name", ["adamw", "sgd-nesterov", "adagrad", "adam-maximize-tensor-lr", "adamw-fused"]
)
def test_training_is_the_same_to_the_last_bit(name: str, place: str, tmp_path: Path) -> None:
    folder = tmp_path if place == "disk" else None
    plain = train(OPTIMIZERS[name], None, set_to_none=place == "ram", load_at=3)
    ours = train(
        OPTIMIZERS[name],
        lambda o, groups: offload_step(o, groups, folder, device=CPU, copies=KeptCopies()),
        set_to_none=place == "ram",
        load_at=3,
    )
    assert_same(plain, ours)


def windows_and_edits(model: Any, optimizer: Any) -> None:
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


@pytest.mark.parametrize("place", ["ram", "disk"])
def test_windows_clipping_and_edited_parameters(place: str, tmp_path: Path) -> None:
    for copies in (KeptCopies(), Copies(CPU)):  # those that see every later change of their source, and none
        folder = tmp_path if place == "disk" else None
        assert_same_with_offload(windows_and_edits, folder, copies=copies)


def test_copies_of_parameters_on_disk_move_the_bytes_of_the_formula(tmp_path: Path) -> None:
    model = Model(width=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = offload_step(optimizer, groups_of(model), tmp_path, copies=KeptCopies())
    _, padded, moved = moved_bytes(model, optimizer, step)
    assert [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(moved)] == [(3 * padded, 3 * padded)] * 2


def test_an_optimizer_that_looks_at_all_parameters_is_refused() -> None:
    with pytest.raises(UsageError, match="LBFGS"):
        offload_step(torch.optim.LBFGS(Model().parameters()), [], copies=Copies(CPU))
