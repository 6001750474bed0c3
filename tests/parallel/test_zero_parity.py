"""Every stage of ZeRO, in every form, gives the numbers of plain single-process training."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

from lockstep import Accelerator
from parallel import zero_problem as problem


@dataclass(frozen=True)
class Case:
    world_size: int
    parallel: str
    accumulation: int

    def __str__(self) -> str:
        return f"{self.world_size}x-{self.parallel.replace(' ', '-')}-accumulate{self.accumulation}"


CASES = [
    *(Case(*values) for values in product((2, 4), ("zero=1", "zero=2", "zero=3"), (1, 3))),
    *(Case(4, f"zero={stage} replicate=2", 3) for stage in (1, 2, 3)),
    Case(4, "zero=3 hpz=2", 3),
    Case(2, "zero=3 forward_prefetch", 1),
    Case(2, "zero=3 offload", 3),
    Case(2, "zero=2 activation=full", 3),
    Case(2, "zero=3 activation=full", 1),
    Case(2, "zero=3 activation=selective", 1),
    Case(2, "zero=3 blocks=layers.0,layers.2", 1),
    Case(1, "zero=3", 3),
    Case(2, "ddp", 3),
]


def full(tensor: Any) -> torch.Tensor:
    """The whole tensor, gathered by torch."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(case: Case, optimizer_name: str) -> problem.Result:
    """The script as a user writes it; runs on each rank."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.accumulation, parallel=case.parallel)
    model = problem.make_model()
    optimizer = problem.make_optimizer(optimizer_name, model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    result = problem.Result([], [], {}, {})
    window: list[float] = []
    for tokens, labels in problem.make_batches(problem.STEPS[optimizer_name] * case.accumulation):
        with accelerator.accumulate(model):
            loss = problem.loss_of(model, tokens.chunk(world_size)[rank], labels.chunk(world_size)[rank])
            accelerator.backward(loss)
            window.append(accelerator.reduce(loss.detach(), "mean").item())
            if accelerator.sync_gradients:
                plain = accelerator.unwrap_model(model)
                result.gradients = {
                    n: full(p.grad) for n, p in plain.named_parameters() if p.grad is not None
                }
                result.norms.append(accelerator.clip_grad_norm_(model.parameters(), problem.CLIP).item())
                result.losses.append(sum(window) / len(window))
                window = []
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.scheduler.step()  # once a step, as in the plain loop
            optimizer.zero_grad()
    result.parameters = {n: full(p) for n, p in accelerator.unwrap_model(model).named_parameters()}
    return result


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_equals_plain_single_process_training(run_distributed, case: Case) -> None:
    for optimizer_name in ("adamw", "sgd"):
        expected = problem.train(optimizer_name, case.accumulation)
        results = run_distributed(train, case.world_size, case, optimizer_name)
        for result in results:
            assert result.losses == pytest.approx(expected.losses, rel=2e-6)
            assert result.norms == pytest.approx(expected.norms, rel=1e-5)
            assert problem.difference(result.gradients, expected.gradients) < 1e-5
            if optimizer_name == "sgd":
                assert problem.difference(result.parameters, expected.parameters) < 1e-5
        for result in results[1:]:
            assert problem.difference(result.parameters, results[0].parameters) == 0
