"""LocalSGD against plain copies of a model that are averaged by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep import Accelerator, LocalSGD
from parallel.asynchronous import problem
from parallel.asynchronous.problem import Tensors, Worker


def train(
    steps: int, every: int, accumulation: int = 1, enabled: bool = True, weight: int | None = None
) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = problem.make_model()
    model, optimizer = accelerator.prepare(model, problem.make_sgd(model))
    before_last: Tensors = {}
    with accelerator.communication() as counter, LocalSGD(accelerator, model, every, enabled) as local_sgd:
        for number in range(steps * accumulation):
            with accelerator.accumulate(model):
                loss = problem.loss_of(model, accelerator.process_index, number)
                accelerator.backward(loss, weight=weight)
                optimizer.step()
                local_sgd.step()
                optimizer.zero_grad()
            if number == steps * accumulation - 2:
                before_last = problem.tensors(model)
    averaged = [record for record in counter.records if record.operation == "all_reduce"]
    return {
        "end": problem.tensors(model),
        "before_last": before_last,
        "steps": local_sgd.num_steps,
        "averaged_bytes": sum(record.payload_bytes for record in averaged),
        "syncs": getattr(model, "require_backward_grad_sync", True),
    }


def simulate(world_size: int, steps: int, every: int, accumulation: int = 1) -> Tensors:
    workers = [Worker(rank) for rank in range(world_size)]
    for step in range(1, steps + 1):
        for worker in workers:
            worker.step([(step - 1) * accumulation + i for i in range(accumulation)])
        if step % every == 0 or step == steps:
            problem.put(workers, problem.mean_of(workers))
    return problem.tensors(workers[0].model)


def test_equal_weights_are_the_mean_over_each_ranks_own_window(run_distributed) -> None:
    results = run_distributed(train, 2, 4, 2, 2, weight=5)
    assert problem.distance(results[0]["end"], simulate(2, 4, 2, 2)) < 1e-6


@pytest.mark.parametrize(("steps", "every", "accumulation"), [(7, 3, 1), (6, 2, 2), (3, 5, 1)])
def test_parameters_and_running_statistics_are_those_of_copies_averaged_by_hand(
    run_distributed, steps: int, every: int, accumulation: int
) -> None:
    results = run_distributed(train, 2, steps, every, accumulation)
    ends = [result["end"] for result in results]
    assert problem.are_equal(ends)
    assert problem.distance(ends[0], simulate(2, steps, every, accumulation)) < 1e-6
    assert [result["steps"] for result in results] == [steps, steps]
    # In fp32 and with nothing beside it: means of what is floating-point, at each meeting.
    meetings = -(-steps // every)
    model = problem.make_model()
    floating = [t for t in model.state_dict().values() if t.is_floating_point()]
    assert results[0]["averaged_bytes"] == meetings * 4 * sum(t.numel() for t in floating)
    assert all(result["syncs"] for result in results)  # gradients are averaged again after the block


def test_one_process_trains_as_without_it(run_distributed) -> None:
    (result,) = run_distributed(train, 1, 4, 2)
    worker = Worker(0)
    for number in range(4):
        worker.step([number])
    assert problem.distance(result["end"], problem.tensors(worker.model)) < 1e-6
    assert result["averaged_bytes"] == 0


def half_means() -> list[Any]:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    rank = accelerator.process_index
    model = torch.nn.Linear(2, 1, bias=False).to(torch.bfloat16)
    model = accelerator.prepare(model)
    with LocalSGD(accelerator, model, 1), torch.no_grad():
        model.module.weight.copy_(torch.tensor([[256.0, 1.0]]) if rank else torch.tensor([[258.0, 2.0]]))
    return model.module.weight.flatten().tolist()


def test_the_mean_of_halves_is_rounded_once(run_distributed) -> None:
    # 256 + 258 = 514 is no bfloat16 and would round to 512 or 516; the mean rounds to even, 256.
    assert run_distributed(half_means, 2) == [[256.0, 1.5]] * 2


def loss_scales() -> tuple[float, bool]:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = problem.make_plain_model()
    model, optimizer = accelerator.prepare(model, problem.make_sgd(model))
    skipped = False
    with LocalSGD(accelerator, model, 2) as local_sgd:
        for number in range(2):
            loss = problem.loss_of(model, accelerator.process_index, number)
            infinite = number == 0 and accelerator.process_index == 1
            accelerator.backward(loss * float("inf") if infinite else loss)
            optimizer.step()
            skipped |= optimizer.step_was_skipped
            local_sgd.step()
            optimizer.zero_grad()
    return accelerator.scaler.get_scale(), skipped


def test_ranks_leave_with_the_smallest_of_their_loss_scales(run_distributed) -> None:
    assert run_distributed(loss_scales, 2) == [(2.0**15, False), (2.0**15, True)]
