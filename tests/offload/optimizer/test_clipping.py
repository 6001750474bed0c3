"""Clipping of gradients in files: what was known when they were written, and what was done to them since."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import OffloadError
from lockstep.offload.files import OffloadFile, region_of
from lockstep.offload.optimizer import (
    GradientFile,
    OffloadedStep,
    norm_of,
    offload_step,
    scale_offloaded,
)
from tests.offload.optimizer.test_gradients import gradients
from tests.offload.optimizer.test_offloaded import Model, announce, assert_same, batches, groups_of, loss_of

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
        with pytest.raises(OffloadError, match="bytes .*Input/output error"):
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


def clip(model: nn.Module, max_norm: float = 0.05) -> None:
    norm = norm_of(found(model), 2.0)
    scale_offloaded(found(model), max_norm, norm)


def trained_pair(folder: Path) -> tuple[list[Any], list[torch.optim.AdamW], GradientFile, OffloadedStep]:
    plain, ours, file = pair(folder)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (plain, ours)]
    groups = groups_of(ours)
    step = offload_step(optimizers[1], groups, folder)
    announce(groups, step)
    return [plain, ours], optimizers, file, step


def clip_both(models: list[Any]) -> None:
    plain, ours = models
    nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    clip(ours)


def test_the_step_scales_gradients_and_nobody_writes_them(tmp_path: Path) -> None:
    models, optimizers, file, step = trained_pair(tmp_path)
    for tokens in batches():
        started = file.file.bytes_written
        for model in models:
            loss_of(model, tokens).backward()
        before = file.file.bytes_read, file.file.bytes_written
        clip_both(models)
        versions = [g._version for g in found(models[1])]
        for optimizer in optimizers:
            optimizer.step()
        step.finish()
        assert file.file.bytes_read - before[0] == before[1] - started > 0
        assert file.file.bytes_written == before[1]
        assert [g._version for g in found(models[1])] == versions  # it is counted as a change when clipped
        for optimizer in optimizers:
            optimizer.zero_grad()
    step.close()
    assert_same([p.detach() for p in models[0].parameters()], [p.detach() for p in models[1].parameters()])


LOOKS: dict[str, Change] = {
    "a copy": lambda g: g.clone(),
    "its data": lambda g: g.data.clone(),
    "detached": lambda g: g.detach().clone(),
    "a view": lambda g: g.view(-1)[3:9].clone(),
    "an array": lambda g: torch.from_numpy(g.numpy().copy()),
    "a sum": lambda g: g.sum(),
    "of a list": lambda g: torch._foreach_mul([g], 1.0)[0],
    "stacked": lambda g: torch.stack([g, g]),
    "keyword": lambda g: torch.add(input=g, other=g),
    "another one's operand": lambda g: torch.ones_like(g, memory_format=torch.contiguous_format) + g,
    "copied deeply": lambda g: copy.deepcopy(g),
    "an element": lambda g: torch.tensor(g.flatten()[1].item()),
    "written out": lambda g: torch.tensor(
        [float(word) for word in str(g.flatten()[:2].tolist())[1:-1].split(",")]
    ),
    "changed": lambda g: g.mul_(2).clone(),
    "changed without a version": lambda g: g.data.mul_(2).clone(),
}


@pytest.mark.parametrize(
    ("look", "moment"),
    [(look, ("before the step", "after the step")[i % 2]) for i, look in enumerate(LOOKS)],
)
def test_who_looks_at_a_clipped_gradient_sees_it_scaled(look: str, moment: str, tmp_path: Path) -> None:
    models, optimizers, _, step = trained_pair(tmp_path)
    seen: list[list[Any]] = [[], []]
    for tokens in batches(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, tokens).backward()
        clip_both(models)
        for model, optimizer, values in zip(models, optimizers, seen, strict=True):
            if moment == "after the step":
                optimizer.step()
                if look.startswith("changed"):
                    step.finish()
            gradient = model.blocks[1].linear.weight.grad
            assert (gradient.shape, gradient.dtype, gradient.is_contiguous()) == (
                (35, 35),
                torch.float32,
                True,
            )
            values.append(LOOKS[look](gradient))
            assert type(gradient) is torch.Tensor
            if moment == "before the step":
                optimizer.step()
    step.close()
    assert_same(*seen)
    assert_same(gradients(models[0]), gradients(models[1]))
    assert_same([p.detach() for p in models[0].parameters()], [p.detach() for p in models[1].parameters()])


def test_clipped_gradients_are_clipped_again_and_added_to(tmp_path: Path) -> None:
    models, optimizers, _, step = trained_pair(tmp_path)
    for tokens in batches(4):
        for model in models:
            loss_of(model, tokens).backward()
        clip_both(models)
        nn.utils.clip_grad_norm_(models[0].parameters(), 0.01)
        clip(models[1], 0.01)
        nn.utils.clip_grad_value_(models[0].parameters(), 1e-4)
        nn.utils.clip_grad_value_(models[1].parameters(), 1e-4)
        clip_both(models)
        for optimizer in optimizers:
            optimizer.step()
    step.close()
    assert_same(gradients(models[0]), gradients(models[1]))
    assert_same([p.detach() for p in models[0].parameters()], [p.detach() for p in models[1].parameters()])


def test_a_gradient_that_was_left_behind_does_not_scale_the_next_one(tmp_path: Path) -> None:
    """Both lie at one place in the file."""
    models, _, _, step = trained_pair(tmp_path)
    tokens = next(batches())
    for model in models:
        loss_of(model, tokens).backward()
    clip_both(models)
    kept = models[1].blocks[1].linear.weight.grad
    for model in models:
        model.zero_grad()
        loss_of(model, tokens).backward()
    assert kept.sum() == models[0].blocks[1].linear.weight.grad.sum()
    assert_same(gradients(models[0]), gradients(models[1]))
    step.close()
