"""Clipping of whole windows, against torch's on one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lockstep import Accelerator, GradScalerKwargs
from lockstep.comm import total_norm
from lockstep.errors import ConfigError
from lockstep.optimizer import PreparedOptimizer
from lockstep.runtime import StepState
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


@pytest.mark.parametrize(
    ("world_size", "precision", "accumulation", "norm_type"),
    [(1, "no", 1, 2.0), (2, "fp16", 3, 2.0), (4, "no", 3, float("inf"))],
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


@pytest.mark.parametrize(("world_size", "precision"), [(1, "no"), (2, "fp16")])
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


def stepped(
    precision: str, accumulation: int, also_by_hand: bool = False, bad_rank: int | None = None
) -> tuple[bool, dict[str, torch.Tensor]]:
    """Whether the step was skipped, and the parameters after it, with an optimizer that clips by itself."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulation,
        kwargs_handlers=[GradScalerKwargs(init_scale=4096.0)],
    )
    plain = problems.make_model()
    model = accelerator.prepare(plain)
    own = torch.optim.SGD(plain.parameters(), lr=10.0)  # so that rounding of the parameters does not show
    optimizer = PreparedOptimizer(own, accelerator.gradient_state, accelerator._scaler, clip_norm=MAX_NORM)
    accelerator.gradient_state.sync_with_dataloader = False
    for i in range(accumulation):
        rows, labels = problems.make_rows(accelerator.process_index, i, 4)
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(rows), labels)
            accelerator.backward(loss * (float("inf") if accelerator.process_index == bad_rank else 1.0))
            if also_by_hand:
                accelerator.unscale_gradients(optimizer)
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            before = problems.gradients(plain)
            optimizer.step()
            if not accelerator.sync_gradients:
                assert problems.difference(problems.gradients(plain), before) == 0
    return optimizer.step_was_skipped, problems.parameters(plain)


@pytest.mark.parametrize(
    ("world_size", "precision", "accumulation", "also_by_hand"),
    [(1, "fp16", 1, True), (2, "no", 3, False), (2, "fp16", 3, False)],
)
def test_an_optimizer_that_clips_steps_as_one_process_that_clips_before_its_step(
    run_distributed, world_size: int, precision: str, accumulation: int, also_by_hand: bool
) -> None:
    model = problems.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    parts = [problems.make_rows(r, i, 4) for r in range(world_size) for i in range(accumulation)]
    rows, labels = (torch.cat(column) for column in zip(*parts, strict=True))
    F.cross_entropy(model(rows), labels).backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM) > 2 * MAX_NORM
    optimizer.step()
    start = problems.parameters(problems.make_model())
    expected = {name: p - start[name] for name, p in problems.parameters(model).items()}
    # Clipping a second time can take off 1e-6 / MAX_NORM, the constant that torch adds to the norm.
    tolerance = (1e-4 if also_by_hand else 1e-5) if precision == "no" else 5e-3
    for skipped, parameters in run_distributed(stepped, world_size, precision, accumulation, also_by_hand):
        moved = {name: p - start[name] for name, p in parameters.items()}
        assert not skipped
        assert problems.difference(moved, expected) < tolerance


@pytest.mark.parametrize("world_size", [1, 2])
def test_infinite_fp16_gradients_are_skipped_and_not_clipped_into_a_step(
    run_distributed, world_size: int
) -> None:
    start = problems.parameters(problems.make_model())
    for skipped, parameters in run_distributed(stepped, world_size, "fp16", 1, False, world_size - 1):
        assert skipped
        assert problems.difference(parameters, start) == 0


def test_the_norm_is_that_of_all_parameter_groups_together() -> None:
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    own = torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:], "lr": 10.0}], lr=1.0)
    for weight, gradient in zip(weights, (3.0, 4.0), strict=True):
        weight.grad = torch.tensor([gradient])
    PreparedOptimizer(own, StepState(), clip_norm=1.0).step()
    assert weights[0].item() == pytest.approx(-0.6)
    assert weights[1].item() == pytest.approx(-8.0)


def test_each_gradient_that_a_closure_computes_is_clipped() -> None:
    def train(optimizer: torch.optim.Optimizer, model: nn.Module, by_hand: bool) -> dict[str, torch.Tensor]:
        rows, labels = problems.make_rows(0, 0, 12)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(rows), labels)
            loss.backward()
            if by_hand:
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return problems.parameters(model)

    reference, model = problems.make_model(), problems.make_model()
    expected = train(torch.optim.LBFGS(reference.parameters(), max_iter=3), reference, by_hand=True)
    own = torch.optim.LBFGS(model.parameters(), max_iter=3)
    found = train(PreparedOptimizer(own, StepState(), clip_norm=MAX_NORM), model, by_hand=False)
    assert problems.difference(found, expected) < 1e-5


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan")])
def test_a_bound_that_is_not_positive_is_refused(bound: float) -> None:
    own = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ConfigError):
        PreparedOptimizer(own, StepState(), clip_norm=bound)


def norm_of_shards(dtype: torch.dtype, norm_type: float) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (Accelerator(cpu=True).num_processes,))
    return total_norm([distribute_tensor(torch.full((4,), 200.0, dtype=dtype), mesh, [Shard(0)])], norm_type)


@pytest.mark.parametrize(
    ("dtype", "norm_type", "expected"),
    [(torch.float16, 2.0, 400.0), (torch.bfloat16, 1.0, 800.0), (torch.float64, float("inf"), 200.0)],
)
def test_a_norm_does_not_overflow_where_only_its_power_would(
    run_distributed, dtype: torch.dtype, norm_type: float, expected: float
) -> None:
    for norm in run_distributed(norm_of_shards, 2, dtype, norm_type):
        assert norm.dtype is dtype
        assert norm.item() == pytest.approx(expected, rel=torch.finfo(dtype).eps)
