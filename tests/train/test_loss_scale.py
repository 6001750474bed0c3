"""fp16: the dynamic loss scale, and what a skipped step leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler

from lockstep import Accelerator, GradScalerKwargs
from lockstep.errors import UsageError
from tests.refusals import expect_refusal
from train import problems

SCALE = 1024.0


def fp16(**options: Any) -> Accelerator:
    return Accelerator(
        cpu=True,
        mixed_precision="fp16",
        kwargs_handlers=[GradScalerKwargs(init_scale=SCALE, growth_interval=1000)],
        **options,
    )


def step_with_infinity(accumulation: int) -> list[dict[str, Any]]:
    """Three steps; in the second one the gradients of the last rank overflow."""
    accelerator = fp16(gradient_accumulation_steps=accumulation, step_scheduler_with_optimizer=True)
    plain = problems.make_model()
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer, scheduler = accelerator.prepare(plain, own, lr_scheduler.StepLR(own, 1, gamma=0.5))
    found = []
    for i in range(3):
        before = problems.parameters(plain)
        for j in range(accumulation):
            rows, labels = problems.make_rows(accelerator.process_index, 10 * i + j, 4)
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(rows), labels)
                if i == 1 and j == 0 and accelerator.is_last_process:
                    loss = loss * float("inf")
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        found.append(
            {
                "skipped": accelerator.optimizer_step_was_skipped,
                "own skipped": optimizer.step_was_skipped,
                "scale": accelerator.scaler.get_scale(),
                "schedule": scheduler.last_epoch,
                "changed": problems.difference(problems.parameters(plain), before) > 0,
                "weight": plain[0].weight.detach().clone(),
            }
        )
    return found


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 3), (4, 1)])
def test_infinity_on_one_rank_skips_the_step_on_all(
    run_distributed, world_size: int, accumulation: int
) -> None:
    results = run_distributed(step_with_infinity, world_size, accumulation)
    for result in results:
        assert [step["skipped"] for step in result] == [False, True, False]
        assert [step["own skipped"] for step in result] == [False, True, False]
        assert [step["changed"] for step in result] == [True, False, True]
        assert [step["scale"] for step in result] == [SCALE, SCALE / 2, SCALE / 2]
        assert [step["schedule"] for step in result] == [world_size, world_size, 2 * world_size]
        assert torch.equal(result[-1]["weight"], results[0][-1]["weight"])


def test_training_equals_autocast_and_grad_scaler_in_plain_torch() -> None:
    accelerator = fp16()
    plain, other = problems.make_model(), problems.make_model()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    own, scaler = torch.optim.SGD(other.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=SCALE)
    for i in range(5):
        rows, labels = problems.make_rows(0, i, 8)
        accelerator.backward(F.cross_entropy(model(rows), labels))
        optimizer.step()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = other(rows)
        scaler.scale(F.cross_entropy(logits.float(), labels)).backward()
        scaler.step(own)
        scaler.update()
        own.zero_grad()
    assert problems.difference(problems.parameters(plain), problems.parameters(other)) == 0


def with_an_own_scaler(turned_off: bool) -> dict[str, Any]:
    """What imagen-pytorch does: it sets its own scaler before each forward and each step."""
    accelerator = fp16()
    plain = problems.make_model()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=not turned_off)
    for i in range(5):
        rows, labels = problems.make_rows(accelerator.process_index, i, 8)
        accelerator.scaler = optimizer.scaler = scaler
        loss = F.cross_entropy(model(rows), labels) * (float("inf") if i == 3 and not turned_off else 1)
        accelerator.backward(loss)
        accelerator.scaler = optimizer.scaler = scaler
        accelerator.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    assert accelerator.scaler is optimizer.scaler is scaler
    return {"parameters": problems.parameters(plain), "scale": scaler.get_scale()}


def with_an_own_scaler_in_torch(world_size: int, turned_off: bool) -> dict[str, Any]:
    plain = problems.make_model()
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=not turned_off)
    for i in range(5):
        for rank in range(world_size):
            rows, labels = problems.make_rows(rank, i, 8)
            with torch.autocast("cpu", torch.float16):
                logits = plain(rows)
            loss = F.cross_entropy(logits.float(), labels) * (
                float("inf") if i == 3 and not turned_off else 1
            )
            scaler.scale(loss / world_size).backward()
        scaler.unscale_(own)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        scaler.step(own)
        scaler.update()
        own.zero_grad()
    return {"parameters": problems.parameters(plain), "scale": scaler.get_scale()}


@pytest.mark.parametrize(("world_size", "turned_off"), [(1, True), (2, False)])
def test_a_script_may_scale_by_its_own_scaler(run_distributed, world_size: int, turned_off: bool) -> None:
    expected = with_an_own_scaler_in_torch(world_size, turned_off)
    for result in run_distributed(with_an_own_scaler, world_size, turned_off):
        assert result["scale"] == expected["scale"]
        # fp16 sums of two ranks' gradients are rounded in another order.
        assert (
            problems.difference(result["parameters"], expected["parameters"]) < (1e-6, 1e-3)[world_size - 1]
        )


def own_scaler_of_parts(parallel: str) -> str:
    try:
        fp16(parallel=parallel).scaler = torch.amp.GradScaler("cpu")
    except UsageError as error:
        return str(error)
    return ""


def test_an_own_scaler_is_refused_where_nothing_is_scaled_or_gradients_are_in_parts(run_distributed) -> None:
    for parallel in ("zero=3", "tp=2"):
        for said in run_distributed(own_scaler_of_parts, 2, parallel):
            assert "scaler was set" in said and "GradScalerKwargs" in said
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    expect_refusal(UsageError, "scaler was set", setattr, accelerator, "scaler", torch.amp.GradScaler("cpu"))
    for scaler in (None, torch.amp.GradScaler("cpu", enabled=False)):
        accelerator.scaler = scaler
        assert accelerator.scaler is None


def two_optimizers(infinite_step: int, accumulation: int, interleaved: bool) -> dict[str, Any]:
    """Two models that step apart; the first one's gradients overflow in one step, which halves the scale."""
    accelerator = fp16(gradient_accumulation_steps=accumulation)
    plains = [problems.make_model(0), problems.make_model(1)]
    owns = [torch.optim.SGD(plain.parameters(), lr=0.1) for plain in plains]
    first, second, *optimizers = accelerator.prepare(*plains, *owns)
    skipped = []
    for i in range(4):
        for j in range(accumulation):
            rows, labels = problems.make_rows(accelerator.process_index, 10 * i + j, 4)
            with accelerator.accumulate(first, second):
                losses = [F.cross_entropy(model(rows), labels) for model in (first, second)]
                if i == infinite_step and j == accumulation - 1:
                    losses[0] = losses[0] * float("inf")
                if interleaved:  # step before the other's backward
                    for loss, optimizer in zip(losses, optimizers, strict=True):
                        accelerator.backward(loss)
                        optimizer.step()
                        optimizer.zero_grad()
                else:
                    for loss in losses:
                        accelerator.backward(loss)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
        skipped.append([optimizer.step_was_skipped for optimizer in optimizers])
    return {
        "skipped": skipped,
        "any skipped": accelerator.optimizer_step_was_skipped,
        "scale": accelerator.scaler.get_scale(),
        "parameters": [problems.parameters(plain) for plain in plains],
    }


@pytest.mark.parametrize(("world_size", "accumulation", "interleaved"), [(1, 1, True), (2, 3, False)])
def test_one_optimizers_infinity_does_not_touch_the_other(
    run_distributed, world_size: int, accumulation: int, interleaved: bool
) -> None:
    expected = run_distributed(two_optimizers, world_size, -1, accumulation, interleaved)[0]
    for result in run_distributed(two_optimizers, world_size, 1, accumulation, interleaved):
        assert result["skipped"] == [[False, False], [True, False], [False, False], [False, False]]
        assert result["scale"] == SCALE / 2
        # The second model never meets the infinity; powers of two change no rounding above the subnormals.
        assert problems.difference(result["parameters"][1], expected["parameters"][1]) < 1e-3
        assert problems.difference(result["parameters"][0], expected["parameters"][0]) > 1e-3


def test_an_optimizer_that_steps_less_often_is_unscaled_by_the_scale_of_its_gradients() -> None:
    accelerator = fp16()
    plains = [problems.make_model(0), problems.make_model(1)]
    owns = [torch.optim.SGD(plain.parameters(), lr=0.1) for plain in plains]
    often, seldom, frequent, rare = accelerator.prepare(*plains, *owns)
    rows, labels = problems.make_rows(0, 0, 8)
    accelerator.backward(F.cross_entropy(seldom(rows), labels))
    for factor in (float("inf"), 1.0):  # the scale halves while the other's gradients wait
        accelerator.backward(F.cross_entropy(often(rows), labels) * factor)
        frequent.step()
        frequent.zero_grad()
    accelerator.unscale_gradients(rare)
    expected = problems.make_model(1)
    with torch.autocast("cpu", torch.float16):
        logits = expected(rows)
    F.cross_entropy(logits.float(), labels).backward()
    assert problems.difference(problems.gradients(plains[1]), problems.gradients(expected)) < 2e-3


def test_gradients_that_were_clipped_stay_clipped_while_another_optimizer_steps() -> None:
    accelerator = fp16()
    plains = [problems.make_model(0), problems.make_model(1)]
    owns = [torch.optim.SGD(plain.parameters(), lr=1.0) for plain in plains]
    first, second, one, other = accelerator.prepare(*plains, *owns)
    rows, labels = problems.make_rows(0, 0, 8)
    accelerator.backward(F.cross_entropy(second(rows), labels))
    accelerator.clip_grad_norm_(second.parameters(), 1e-3)
    for _ in range(2):
        accelerator.backward(F.cross_entropy(first(rows), labels))
        one.step()
        one.zero_grad()
    before = problems.parameters(plains[1])
    other.step()
    moved = [(p - before[name]).norm() for name, p in plains[1].named_parameters()]
    assert torch.stack(moved).norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_an_optimizer_without_gradients_does_not_count_as_skipped() -> None:
    accelerator = fp16()
    plains = [problems.make_model(0), problems.make_model(1)]
    owns = [torch.optim.SGD(plain.parameters(), lr=0.1) for plain in plains]
    first, _, one, idle = accelerator.prepare(*plains, *owns)
    rows, labels = problems.make_rows(0, 0, 8)
    accelerator.backward(F.cross_entropy(first(rows), labels))
    one.step()
    idle.step()
    assert not accelerator.optimizer_step_was_skipped


def test_the_scale_grows_after_enough_finite_steps() -> None:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        kwargs_handlers=[GradScalerKwargs(init_scale=8.0, growth_interval=2, growth_factor=4.0)],
    )
    plain = problems.make_model()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    scales = []
    for i in range(4):
        rows, labels = problems.make_rows(0, i, 4)
        accelerator.backward(F.cross_entropy(model(rows), labels))
        optimizer.step()
        optimizer.zero_grad()
        scales.append(accelerator.scaler.get_scale())
    assert scales == [8, 32, 32, 128]


def test_a_scaler_that_is_turned_off_leaves_losses_alone() -> None:
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(enabled=False)]
    )
    plain = problems.make_model()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    rows, labels = problems.make_rows(0, 0, 4)
    before = problems.parameters(plain)
    accelerator.backward(F.cross_entropy(model(rows), labels))
    assert plain[0].weight.grad.abs().max() < 10
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    assert problems.difference(problems.parameters(plain), before) > 0
