"""Weighted backward: the gradient of one big batch, however it was cut into ranks and micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, DistributedDataParallelKwargs, GradientAccumulationPlugin
from lockstep.errors import UsageError
from train import problems

TOLERANCE = 1e-6


def window(
    form: str,
    micro_batches: int,
    zero_ranks: tuple[int, ...] = (),
    sync_each_batch: bool = False,
    precision: str = "no",
    **ddp: Any,
) -> dict[str, torch.Tensor]:
    """Gradients after one accumulation window. ``form`` says how the weight is passed."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=micro_batches, sync_each_batch=sync_each_batch
        ),
        kwargs_handlers=[DistributedDataParallelKwargs(**ddp)],
    )
    plain = problems.make_model()
    model = accelerator.prepare(plain)
    for i in range(micro_batches):
        count = problems.COUNTS[accelerator.process_index][i]
        rows, labels = problems.make_rows(accelerator.process_index, i, count)
        zero = accelerator.process_index in zero_ranks
        with accelerator.accumulate(model):
            logits = model(rows)
            if form == "number":
                loss = F.cross_entropy(logits, labels)
                accelerator.backward(loss, weight=0 if zero else count)
            elif form == "0-d tensor":
                # As token losses with padding are written: the mean over no token is NaN.
                labels = torch.full_like(labels, -100) if zero else labels
                loss = F.cross_entropy(logits, labels, ignore_index=-100)
                accelerator.backward(loss, weight=(labels != -100).sum())
            elif form == "rows":
                losses = F.cross_entropy(logits, labels, reduction="none")
                accelerator.backward(losses, weight=torch.full((count,), 0.0 if zero else 1.0))
            elif form == "weighted rows":
                losses = F.cross_entropy(logits, labels, reduction="none")
                accelerator.backward(losses, weight=torch.arange(1, count + 1))
            else:
                accelerator.backward(F.cross_entropy(logits, labels))
    assert accelerator.sync_gradients
    return problems.gradients(plain)


@pytest.mark.parametrize(
    ("form", "world_size", "micro_batches"),
    [("number", 4, 3), ("0-d tensor", 1, 3), ("rows", 2, 1), ("weighted rows", 2, 3)],
)
def test_unequal_micro_batches_give_the_gradient_of_the_big_batch(
    run_distributed, form: str, world_size: int, micro_batches: int
) -> None:
    expected = problems.one_big_batch(
        problems.places(world_size, micro_batches), row_weights=form == "weighted rows"
    )
    for actual in run_distributed(window, world_size, form, micro_batches):
        assert problems.difference(actual, expected) < TOLERANCE


@pytest.mark.parametrize(("world_size", "micro_batches"), [(1, 3), (2, 1)])
def test_the_mean_of_means_is_another_gradient(run_distributed, world_size: int, micro_batches: int) -> None:
    expected = problems.one_big_batch(problems.places(world_size, micro_batches))
    for actual in run_distributed(window, world_size, "classic", micro_batches):
        assert problems.difference(actual, expected) > 1e-2


@pytest.mark.parametrize(("form", "micro_batches"), [("number", 1), ("0-d tensor", 3), ("rows", 3)])
def test_a_rank_without_tokens_adds_nothing(run_distributed, form: str, micro_batches: int) -> None:
    counted = [place for place in problems.places(2, micro_batches) if place[0] != 1]
    expected = problems.one_big_batch(counted)
    for actual in run_distributed(window, 2, form, micro_batches, zero_ranks=(1,)):
        assert problems.difference(actual, expected) < TOLERANCE


@pytest.mark.parametrize(("world_size", "micro_batches"), [(1, 3), (2, 1)])
def test_weights_that_are_all_zero_give_gradients_of_zero(
    run_distributed, world_size: int, micro_batches: int
) -> None:
    for actual in run_distributed(window, world_size, "rows", micro_batches, zero_ranks=(0, 1)):
        assert actual
        assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in actual.values())


@pytest.mark.parametrize(
    "options",
    [
        {"sync_each_batch": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [2])
def test_every_way_of_averaging_gives_the_gradient_of_the_big_batch(
    run_distributed, world_size: int, options: dict[str, Any]
) -> None:
    expected = problems.one_big_batch(problems.places(world_size, 3))
    for actual in run_distributed(window, world_size, "number", 3, **options):
        assert problems.difference(actual, expected) < TOLERANCE


def test_loss_scale_and_weights_go_together(run_distributed) -> None:
    expected = problems.one_big_batch(problems.places(2, 3))
    for actual in run_distributed(window, 2, "number", 3, precision="fp16"):
        unscaled = {name: gradient / 65536 for name, gradient in actual.items()}
        assert problems.difference(unscaled, expected) < 5e-3  # half precision inside


def accumulated_ragged_epoch(weighted: bool) -> list[dict[str, torch.Tensor]]:
    """Windows of 2 micro-batches over 11 samples in batches of 4 rows in all: the last window is short."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = problems.make_model()
    dataset = TensorDataset(*problems.make_rows(0, 0, 11))
    model, loader = accelerator.prepare(plain, DataLoader(dataset, batch_size=4 // accelerator.num_processes))
    steps = []
    for rows, labels in loader:
        with accelerator.accumulate(model):
            losses = F.cross_entropy(model(rows), labels, reduction="none")
            if weighted:
                accelerator.backward(losses, weight=accelerator.sample_weights())
            else:
                accelerator.backward(losses.mean())
            if accelerator.sync_gradients:
                steps.append(problems.gradients(plain))
                plain.zero_grad()
    return steps


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_short_last_window_is_the_mean_of_its_own_samples(run_distributed, world_size: int) -> None:
    rows, labels = problems.make_rows(0, 0, 11)
    expected = []
    for part, targets in ((rows[:8], labels[:8]), (rows[8:], labels[8:])):
        model = problems.make_model()
        F.cross_entropy(model(part), targets).backward()
        expected.append(problems.gradients(model))
    for steps in run_distributed(accumulated_ragged_epoch, world_size, True):
        for actual, gradient in zip(steps, expected, strict=True):
            assert problems.difference(actual, gradient) < TOLERANCE
    for steps in run_distributed(accumulated_ragged_epoch, world_size, False):
        # On one process this window is one micro-batch; on several a row of it comes twice.
        assert (problems.difference(steps[1], expected[1]) < TOLERANCE) == (world_size == 1)


def short_windows(parallel: str, epochs: int) -> list[dict[str, torch.Tensor]]:
    """Windows of 3 micro-batches; an epoch has 5."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, parallel=parallel, split_batches=True)
    plain = problems.make_model()
    data = TensorDataset(*problems.make_rows(0, 0, 40))
    model, optimizer, loader = accelerator.prepare(
        plain, torch.optim.SGD(plain.parameters(), lr=0.1), DataLoader(data, batch_size=8)
    )
    states = []
    for _ in range(epochs):
        for rows, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(rows), labels)
                # Two backwards in a micro-batch are the backward of a sum.
                accelerator.backward(loss / 4, retain_graph=True)
                accelerator.backward(loss * 3 / 4)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                states.append(
                    {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
                )
    return states


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [(1, "ddp"), (4, "ddp"), (2, "zero=1"), (2, "zero=3")],
)
def test_a_window_that_the_end_cuts_short_is_the_mean_of_its_micro_batches(
    run_distributed, world_size: int, parallel: str
) -> None:
    model, expected = problems.make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows, labels = problems.make_rows(0, 0, 40)
    for _ in range(2):
        for window in (slice(0, 24), slice(24, 40)):
            optimizer.zero_grad()
            F.cross_entropy(model(rows[window]), labels[window]).backward()
            optimizer.step()
            expected.append({name: value.clone() for name, value in model.state_dict().items()})
    for states in run_distributed(short_windows, world_size, parallel, 2):
        for state, wanted in zip(states, expected, strict=True):
            for name in wanted:
                torch.testing.assert_close(state[name], wanted[name])


def refusal(kind: str) -> str:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2 if kind in ("mixed", "twice") else 1)
    model = accelerator.prepare(problems.make_model())
    rows, labels = problems.make_rows(accelerator.process_index, 0, 4)
    losses = F.cross_entropy(model(rows), labels, reduction="none")
    with pytest.raises(UsageError) as error:
        if kind == "mixed":
            with accelerator.accumulate(model):
                accelerator.backward(losses.mean(), weight=4)
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(rows), labels))
        elif kind == "twice":
            with accelerator.accumulate(model):
                accelerator.backward(losses.mean(), weight=4)
                accelerator.backward(F.cross_entropy(model(rows), labels), weight=4)
        elif kind == "negative":
            accelerator.backward(losses.mean(), weight=-1)
        elif kind == "negative rows":
            accelerator.backward(losses, weight=torch.tensor([1.0, -1.0, 1.0, 1.0]))
        elif kind == "shape":
            accelerator.backward(losses, weight=torch.ones(3))
        elif kind == "number for rows":
            accelerator.backward(losses, weight=4)
        elif kind == "join":
            with accelerator.join_uneven_inputs([model]):
                accelerator.backward(losses.mean(), weight=4)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "world_size", "words"),
    [
        ("mixed", 1, "all of them or to none"),
        ("mixed", 2, "all of them or to none"),
        ("twice", 1, "call backward once"),
        ("negative", 1, "weight=-1"),
        ("negative rows", 1, "1 negative weights"),
        ("shape", 1, "shape (4,) and weights of shape (3,)"),
        ("number for rows", 1, "shape (4,) and one number"),
        ("join", 2, "inside join_uneven_inputs"),
    ],
)
def test_weights_that_cannot_be_right_are_refused(
    run_distributed, kind: str, world_size: int, words: str
) -> None:
    for message in run_distributed(refusal, world_size, kind):
        assert words in message
