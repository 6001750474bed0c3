"""Clipping of whole windows, against torch's on one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lockstep import Accelerator, GradScalerKwargs
from train import problems

MAX_NORM = 0.05


def clipped(
    precision: str, norm_type: float, accumulation: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Norms returned in each micro-batch, and the gradients after the last."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulation,
        kwargs_handlers=[GradScalerKwargs(init_scale=4096.0)],
    )
    plain = problems.make_model()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    norms = []
    for i in range(accumulation):
        rows, labels = problems.make_rows(accelerator.process_index, i, 4)
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(rows), labels))
            norms.append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type))
            assert norms[-1].shape == ()
    found = problems.gradients(plain)
    optimizer.step()  # fp16: unscaled once, not twice
    moved = [p - q for p, q in zip(plain.parameters(), problems.make_model().parameters(), strict=True)]
    step = {name: move / -0.1 for (name, _), move in zip(plain.named_parameters(), moved, strict=True)}
    assert problems.difference({n: g.detach() for n, g in step.items()}, found) < 1e-3
    return [norm.item() for norm in norms], found


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    ("world_size", "precision"), [(1, "no"), (1, "fp16"), (2, "no"), (2, "fp16"), (4, "no")]
)
def test_the_norm_and_the_clipped_gradients_are_those_of_one_process(
    run_distributed, world_size: int, precision: str, accumulation: int, norm_type: float
) -> None:
    model = problems.make_model()
    parts = [problems.make_rows(r, i, 4) for r in range(world_size) for i in range(accumulation)]
    rows, labels = (torch.cat(column) for column in zip(*parts, strict=True))
    F.cross_entropy(model(rows), labels).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, norm_type).item()
    tolerance = 1e-5 if precision == "no" else 5e-3
    for norms, gradients in run_distributed(clipped, world_size, precision, norm_type, accumulation):
        assert norms[-1] == pytest.approx(expected, rel=tolerance)
        assert problems.difference(gradients, problems.gradients(model)) < tolerance


def clamped(precision: str) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    plain = problems.make_model()
    model, _ = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    rows, labels = problems.make_rows(accelerator.process_index, 0, 4)
    accelerator.backward(F.cross_entropy(model(rows), labels))
    accelerator.clip_grad_value_(model.parameters(), 0.01)
    return problems.gradients(plain)


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_values_are_clamped_after_unscaling(run_distributed, world_size: int, precision: str) -> None:
    model = problems.make_model()
    rows, labels = (
        torch.cat(c) for c in zip(*(problems.make_rows(r, 0, 4) for r in range(world_size)), strict=True)
    )
    F.cross_entropy(model(rows), labels).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    for gradients in run_distributed(clamped, world_size, precision):
        assert problems.difference(gradients, problems.gradients(model)) < (
            1e-5 if precision == "no" else 2e-2
        )


def test_partial_gradients_of_a_window_are_left_alone() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = problems.make_model()
    model, _ = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    rows, labels = problems.make_rows(0, 0, 4)
    with accelerator.accumulate(model):
        accelerator.backward(F.cross_entropy(model(rows), labels))
        before = problems.gradients(plain)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1e-6)
        accelerator.clip_grad_value_(model.parameters(), 1e-6)
    assert problems.difference(problems.gradients(plain), before) == 0
    assert norm == torch.nn.utils.get_total_norm(list(before.values()))


def test_a_generator_a_tensor_or_parameters_without_gradients_can_be_given() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = accelerator.prepare(problems.make_model())
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0) == 0
    weight = next(iter(model.parameters()))
    weight.grad = torch.full_like(weight, 3.0)
    assert accelerator.clip_grad_norm_(weight, 1.0) == pytest.approx(3 * weight.numel() ** 0.5)
    assert weight.grad.norm() == pytest.approx(1.0, rel=1e-4)
