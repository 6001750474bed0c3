"""Clipping of gradients in files: what was known when they were written, and what was done to them since."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import OffloadError
from lockstep.offload.files.direct import OffloadFile, region_of
from lockstep.offload.optimizer.clipping import norm_of
from lockstep.offload.optimizer.gradients import GradientFile
from tests.offload.optimizer.test_gradients import gradients
from tests.offload.optimizer.test_offloaded import Model, assert_same, batches, loss_of

Change = Callable[[Any], object]


def pair(folder: Path) -> tuple[Any, Any, GradientFile]:
    """A plain model, and an equal one whose gradients are in a file."""
    torch.manual_seed(0)
    plain, ours = Model(), Model()
    ours.load_state_dict(plain.state_dict())
    return plain, ours, GradientFile(ours.parameters(), folder)


def found(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.fixture
def taken_later(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The places of gradients that were read from their file for their norm."""
    places: list[int] = []
    drop = OffloadFile.drop
    monkeypatch.setattr(
        OffloadFile, "drop", lambda file, offset, n: (places.append(offset), drop(file, offset, n))
    )
    return places


def test_norms_are_taken_before_gradients_are_written(tmp_path: Path, taken_later: list[int]) -> None:
    plain, ours, file = pair(tmp_path)
    for step, norm_type in enumerate((2.0, 2.0, 2.0, 1.0, 1.0)):
        for _ in range(2):
            for model in (plain, ours):
                loss_of(model, next(batches())).backward()
        taken_later.clear()
        expected = nn.utils.get_total_norm(found(plain), norm_type)
        assert torch.equal(norm_of(found(ours), norm_type), expected)
        learnt = step not in (0, 3) and file.file.is_direct
        assert len(taken_later) == (0 if learnt else len(found(ours)))
        for model in (plain, ours):
            model.zero_grad()


CHANGES: dict[str, Change] = {
    "in place": lambda g: g.mul_(3),
    "without a version": lambda g: g.data.mul_(3),
    "through a view": lambda g: g.view(-1)[3:7].fill_(2.0),
    "one element": lambda g: g.data.view(-1)[5:6].fill_(9.0),
    "as an array": lambda g: g.numpy().fill(0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_done_to_a_gradient_after_backward_is_in_its_norm(change: str, tmp_path: Path) -> None:
    plain, ours, _ = pair(tmp_path)
    for step in range(3):
        for model in (plain, ours):
            model.zero_grad()
            loss_of(model, next(batches())).backward()
            if step:
                CHANGES[change](model.blocks[1].linear.weight.grad)
        assert torch.equal(nn.utils.get_total_norm(found(plain)), norm_of(found(ours), 2.0))
        assert_same(gradients(plain), gradients(ours))


@pytest.mark.parametrize("change", CHANGES)
def test_hooks_of_the_user_change_gradients_as_ever(change: str, tmp_path: Path) -> None:
    plain, ours, _ = pair(tmp_path)
    seen: list[float] = []
    for model in (plain, ours):
        weight, later = model.blocks[1].linear.weight, model.blocks[0].linear.weight
        weight.register_post_accumulate_grad_hook(lambda p: (CHANGES[change](p.grad), None)[1])

        def look(_: torch.Tensor, model: Any = model) -> None:
            """At gradients that came before in this backward: they are in memory or in the file by now."""
            seen.append(model.blocks[2].linear.weight.grad.sum().item())
            model.blocks[1].norm.weight.grad.mul_(0.25)

        later.register_hook(look)
    for _ in range(3):
        for model in (plain, ours):
            loss_of(model, next(batches())).backward()
        assert torch.equal(nn.utils.get_total_norm(found(plain)), norm_of(found(ours), 2.0))
        assert_same(gradients(plain), gradients(ours))
        assert all(region_of(g) for g in found(ours))
    assert len(seen) == 6 and seen[::2] == seen[1::2]


def test_a_disk_that_fails_under_backward_is_told_of_by_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours, _ = pair(tmp_path)

    def fails(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", fails)
        with pytest.raises(OffloadError, match="Could not write .* bytes .*Input/output error"):
            loss_of(ours, next(batches())).backward()
    ours.zero_grad()
    for model in (plain, ours):
        loss_of(model, next(batches())).backward()
    assert_same(gradients(plain), gradients(ours))


def test_a_backward_that_fails_leaves_gradients_that_are_right(tmp_path: Path) -> None:
    plain, ours, _ = pair(tmp_path)
    for model in (plain, ours):
        hook = model.blocks[0].linear.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, next(batches())).backward()
        hook.remove()
    assert_same(gradients(plain), gradients(ours))
    for model in (plain, ours):
        loss_of(model, next(batches())).backward()
    assert_same(gradients(plain), gradients(ours))
    assert all(region_of(g) for g in found(ours))
