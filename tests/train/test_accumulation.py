"""When a window ends, and what is averaged when."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, GradientAccumulationPlugin
from lockstep.errors import ConfigError, UsageError
from train import problems


def ends_of_windows(steps: int, sync_with_dataloader: bool, epochs: int) -> list[list[bool]]:
    plugin = GradientAccumulationPlugin(num_steps=steps, sync_with_dataloader=sync_with_dataloader)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    samples = 5 * accelerator.num_processes
    model, loader = accelerator.prepare(
        problems.make_model(), DataLoader(TensorDataset(*problems.make_rows(0, 0, samples)))
    )
    found = []
    for _ in range(epochs):
        found.append([])
        for rows, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(rows), labels))
                found[-1].append(accelerator.sync_gradients)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_windows_end_at_every_nth_micro_batch_and_at_the_end_of_the_loader(
    run_distributed, world_size: int
) -> None:
    epoch = [False, True, False, True, True]
    assert run_distributed(ends_of_windows, world_size, 2, True, 2) == [[epoch, epoch]] * world_size


def test_without_the_loaders_end_windows_go_on_in_the_next_epoch() -> None:
    assert ends_of_windows(2, False, 2) == [
        [False, True, False, True, False],
        [True, False, True, False, True],
    ]


def test_a_loader_inside_the_loop_of_another_does_not_end_the_outer_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    dataset = TensorDataset(*problems.make_rows(0, 0, 4))
    model, training, validation = accelerator.prepare(
        problems.make_model(), DataLoader(dataset), DataLoader(dataset)
    )
    found = []
    for _ in training:
        list(validation)
        with accelerator.accumulate(model):
            found.append(accelerator.sync_gradients)
    assert found == [False, True, False, True]


def accumulate_and_compare(sync_each_batch: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """How far the gradients of the ranks are apart after each micro-batch, and the last gradients."""
    plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=sync_each_batch)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    plain = problems.make_model()
    model = accelerator.prepare(plain)
    spread = []
    for i in range(3):
        rows, labels = problems.make_rows(accelerator.process_index, i, 4)
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(rows), labels))
        weights = accelerator.gather(plain[0].weight.grad[None])
        spread.append((weights - weights[0]).abs().max().item())
    return spread, problems.gradients(plain)


@pytest.mark.parametrize(("world_size", "sync_each_batch"), [(2, True), (4, False)])
def test_gradients_are_averaged_once_a_window_unless_each_batch_is_asked_for(
    run_distributed, world_size: int, sync_each_batch: bool
) -> None:
    model = problems.make_model()
    for r in range(world_size):
        for i in range(3):
            rows, labels = problems.make_rows(r, i, 4)
            (F.cross_entropy(model(rows), labels) / 3 / world_size).backward()
    for spread, gradients in run_distributed(accumulate_and_compare, world_size, sync_each_batch):
        assert [apart > 0 for apart in spread] == ([False] * 3 if sync_each_batch else [True, True, False])
        assert problems.difference(gradients, problems.gradients(model)) < 1e-6


def without_averaging() -> list[float]:
    accelerator = Accelerator(cpu=True)
    plain = problems.make_model()
    model = accelerator.prepare(plain)
    rows, labels = problems.make_rows(accelerator.process_index, 0, 4)
    found = []

    def spread() -> float:
        weights = accelerator.gather(plain[0].weight.grad[None])
        return (weights - weights[0]).abs().max().item()

    with accelerator.no_sync(model):
        accelerator.backward(F.cross_entropy(model(rows), labels))
    found.append(spread())
    accelerator.backward(F.cross_entropy(model(rows), labels))
    found.append(spread())
    plain.zero_grad()
    with accelerator.no_sync(model):
        loss = F.cross_entropy(model(rows), labels)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    found.append(spread())
    return found


def test_no_sync_holds_averaging_back_until_the_next_backward_or_a_trigger(run_distributed) -> None:
    for found in run_distributed(without_averaging, 2):
        assert [apart > 0 for apart in found] == [True, False, False]


def test_the_number_of_steps_can_change_between_windows() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
    model = accelerator.prepare(problems.make_model())
    found = []
    for steps in (2, 2, 3, 3, 3):
        accelerator.gradient_accumulation_steps = steps
        with accelerator.accumulate(model):
            found.append(accelerator.sync_gradients)
    assert accelerator.gradient_accumulation_steps == 3
    assert found == [False, True, True, False, False]  # the count goes on: 2, 3 and 6 are divisible
    for wrong in (0, -1, 1.5, "2"):
        with pytest.raises(ConfigError):
            accelerator.gradient_accumulation_steps = wrong


def test_number_and_plugin_must_not_contradict_each_other() -> None:
    plugin = GradientAccumulationPlugin(num_steps=4)
    assert Accelerator(cpu=True, gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 4
    with pytest.raises(ConfigError, match="contradicts"):
        Accelerator(cpu=True, gradient_accumulation_steps=2, gradient_accumulation_plugin=plugin)


def accumulate_while_joined() -> str:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(problems.make_model())
    with pytest.raises(UsageError) as error:
        with accelerator.join_uneven_inputs([model]):
            with accelerator.accumulate(model):
                pass
    return str(error.value)


def test_windows_of_several_micro_batches_are_refused_for_uneven_inputs(run_distributed) -> None:
    for message in run_distributed(accumulate_while_joined, 2):
        assert "accumulate with 2 steps was used inside join_uneven_inputs" in message


def test_an_unfinished_window_is_forgotten_with_the_objects() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = accelerator.prepare(problems.make_model())
    rows, labels = problems.make_rows(0, 0, 4)
    with accelerator.accumulate(model):
        accelerator.backward(F.cross_entropy(model(rows), labels), weight=4)
    model = accelerator.free_memory(model)[0]
    assert model is None
    model = accelerator.prepare(problems.make_model())
    found = []
    for _ in range(3):
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(rows), labels))
            found.append(accelerator.sync_gradients)
    assert found == [False, False, True]
