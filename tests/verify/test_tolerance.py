"""What rounding explains: runs that are equal in mathematics agree, and what is wrong is seen all the same."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.verify import (
    FEW,
    LARGE,
    MULTIPLE,
    ItemKind,
    ParityVerdict,
    RunFacts,
    Tolerance,
    TraceItem,
    sentence,
    tolerance_of,
)
from tests.verify.runs import measure, ranks_of, record, shaken, synthetic, verdict_of
from tests.verify.training import MODELS, OPTIMIZERS, Setup, train

PAIRS = [
    (model, list(OPTIMIZERS)[(number + shift) % 3], half)
    for number, model in enumerate(MODELS)
    for shift, half in enumerate((None, torch.bfloat16))
]
"""Each model in both precisions, and each optimizer with several of them."""
WEIGHTS = {
    "mlp": "2.weight",
    "attention": "key.weight",
    "normalised": "3.weight",
    "experts": "experts.1.weight",
}
ONE = RunFacts(nproc=1, data_ranks=3)
RATE, STEP = TraceItem(2, ItemKind.RATE, ""), 2


@cache
def reference(setup: Setup, half: torch.dtype | None) -> tuple[dict[TraceItem, Tensor], ...]:
    """The reference, disturbed, and in half precision."""
    return train(setup), train(setup, disturbed=True), train(setup, half=half) if half else {}


def checked(
    folder: Path, setup: Setup, half: torch.dtype | None, candidate: dict[TraceItem, Tensor]
) -> ParityVerdict:
    plain, off, in_half = reference(replace(setup, plant=Setup("", "").plant), half)
    dtype = half or torch.float32
    return verdict_of(folder, plain, [candidate], disturbed=off, half=in_half or None, dtype=dtype, facts=ONE)


@pytest.mark.parametrize(("model", "optimizer", "half"), PAIRS)
def test_another_order_of_sums_is_no_difference(
    model: str, optimizer: str, half: torch.dtype | None, tmp_path: Path
) -> None:
    setup = Setup(model, optimizer)
    verdict = checked(tmp_path, setup, half, train(setup, half=half, reordered=True))
    assert verdict.agrees, sentence(verdict)
    assert len(verdict.ratios) > 50


@pytest.mark.parametrize(("model", "half"), [(model, half) for model, _, half in PAIRS])
def test_a_gradient_times_a_number_is_found(model: str, half: torch.dtype | None, tmp_path: Path) -> None:
    factor = 0.5 if len(model) % 2 else 2.0

    def plant(step: int, gradients: dict[str, Tensor]) -> None:
        if step == STEP:
            gradients[WEIGHTS[model]] *= factor

    setup = Setup(model, "adam", plant=plant)
    verdict = checked(tmp_path, setup, half, train(setup, half=half, reordered=True))
    first = verdict.findings[0]
    assert first.item == TraceItem(STEP, ItemKind.GRADIENT, WEIGHTS[model]), sentence(verdict)
    assert first.distance == pytest.approx(abs(factor - 1), rel=0.3 if half else 1e-2)


@pytest.mark.parametrize("model", MODELS)
def test_in_single_precision_a_thousandth_is_found(model: str, tmp_path: Path) -> None:
    def plant(step: int, gradients: dict[str, Tensor]) -> None:
        gradients[WEIGHTS[model]] *= 1.001

    setup = Setup(model, "sgd", plant=plant)
    verdict = checked(tmp_path, setup, None, train(setup, reordered=True))
    assert verdict.findings[0].item == TraceItem(1, ItemKind.GRADIENT, WEIGHTS[model]), sentence(verdict)


@pytest.mark.parametrize("half", [None, torch.bfloat16])
@pytest.mark.parametrize(("step", "factor"), [(1, 0.0), (2, 0.0), (1, 2.0), (3, -1.0)])
def test_wrong_updates_of_adam_are_found(
    half: torch.dtype | None, step: int, factor: float, tmp_path: Path
) -> None:
    setup = Setup("attention", "adam")
    candidate = train(setup, half=half, reordered=True)
    for item in candidate:
        if item.kind is ItemKind.UPDATE and item.step == step:
            candidate[item] = factor * candidate[item]
    verdict = checked(tmp_path, setup, half, candidate)
    first = verdict.findings[0].item
    assert (first.step, first.kind) == (step, ItemKind.UPDATE), sentence(verdict)


def test_gradients_that_are_zero_in_mathematics_are_nothing_but_rounding(tmp_path: Path) -> None:
    plain, off, _ = reference(Setup("attention", "adam"), None)
    key = TraceItem(1, ItemKind.GRADIENT, "key.bias")
    assert (plain[key] - off[key]).norm() > 0.1 * plain[key].norm()
    update = key._replace(kind=ItemKind.UPDATE)
    assert (plain[update] - off[update]).norm() > 0.1 * plain[update].norm()
    candidate = {**plain, key: -plain[key], update: -plain[update]}
    assert checked(tmp_path, Setup("attention", "adam"), None, candidate).agrees


def allowed_of(
    folder: Path,
    plain: dict[TraceItem, Tensor],
    off: dict[TraceItem, Tensor],
    dtype: torch.dtype = torch.float32,
) -> Tolerance:
    trace = record(folder / "reference.safetensors", plain)
    return tolerance_of(trace, measure(trace, folder / "disturbed", [off])[0], dtype=dtype)


def test_a_loss_that_came_back_unmoved_may_still_be_rounded(tmp_path: Path) -> None:
    tensors = synthetic()
    loss = TraceItem(1, ItemKind.LOSS, "", data_rank=0)
    off = {**shaken(tensors, eps=1e-5), loss: tensors[loss]}
    limit = allowed_of(tmp_path, tensors, off)[loss.key]
    assert limit.spread >= 1e-6
    assert limit.relative == pytest.approx(MULTIPLE * (1 + FEW) * limit.spread)


def test_no_tensor_of_many_elements_may_be_half_of_what_it_is(tmp_path: Path) -> None:
    tensors = synthetic()
    rough = shaken(tensors, eps=0.3)
    allowed = allowed_of(tmp_path, tensors, rough, torch.bfloat16)
    for item in tensors:
        if item.kind is ItemKind.GRADIENT and item.name == "first.weight":
            assert 0.1 < allowed[item.key].spread < 0.25
            assert allowed[item.key].relative == pytest.approx(max(LARGE, 2 * allowed[item.key].spread))


def test_rows_of_batches_are_equal_or_not(tmp_path: Path) -> None:
    tensors = synthetic()
    batch = TraceItem(2, ItemKind.BATCH, "", data_rank=1, path="x")
    candidate = ranks_of(tensors, 1)[0] | {batch: tensors[batch] + torch.tensor([0, 0, 0, 1])}
    assert (
        verdict_of(tmp_path, tensors, [candidate | tensors | {batch: candidate[batch]}]).findings[0].item
        == batch
    )


@pytest.mark.parametrize(("flipped", "agrees"), [(0.02, True), (0.4, False)])
def test_choices_may_change_as_often_as_by_a_disturbance(
    flipped: float, agrees: bool, tmp_path: Path
) -> None:
    choice = TraceItem(1, ItemKind.OUTPUT, "argmax", data_rank=0)
    tensors = synthetic() | {choice: torch.arange(500)}

    def other(part: float) -> Tensor:
        return torch.arange(500) + (torch.arange(500) < part * 500)

    off = shaken(tensors) | {choice: other(0.01)}
    candidate = {**tensors, choice: other(flipped)}
    assert verdict_of(tmp_path, tensors, [candidate], disturbed=off).agrees == agrees


def test_tensors_whose_shape_depends_on_rounding_are_not_compared(tmp_path: Path) -> None:
    routed = TraceItem(1, ItemKind.OUTPUT, "expert", data_rank=0)
    tensors = synthetic() | {routed: torch.randn(7, 8)}
    off = shaken(tensors) | {routed: torch.randn(8, 8)}
    verdict = verdict_of(tmp_path, tensors, [{**tensors, routed: torch.randn(6, 8)}], disturbed=off)
    assert verdict.agrees
    assert len(verdict.ratios) == len(tensors) - 1


def test_a_value_on_the_other_side_of_a_kink_is_no_difference(tmp_path: Path) -> None:
    setup = Setup("mlp", "adam")
    gradient = TraceItem(1, ItemKind.OUTPUT_GRADIENT, "2", data_rank=1)

    def switch(item: TraceItem, tensor: Tensor) -> Tensor:
        if item != gradient:
            return tensor
        place = (tensor.abs() - tensor[tensor != 0].abs().median()).abs().argmin()
        return tensor.flatten().index_fill(0, place, 0.0).reshape(tensor.shape)

    verdict = checked(tmp_path, setup, None, train(setup, reordered=True, change=switch))
    assert verdict.agrees, sentence(verdict)
    assert any("other side of a kink" in note and "`2`" in note for note in verdict.notes)


def test_a_row_without_gradient_is_a_difference(tmp_path: Path) -> None:
    setup = Setup("mlp", "adam")
    gradient = TraceItem(1, ItemKind.OUTPUT_GRADIENT, "2", data_rank=1)

    def mask(item: TraceItem, tensor: Tensor) -> Tensor:
        return tensor * (torch.arange(len(tensor)) != 3).unsqueeze(1) if item == gradient else tensor

    verdict = checked(tmp_path, setup, None, train(setup, reordered=True, change=mask))
    assert verdict.findings[0].item == gradient
