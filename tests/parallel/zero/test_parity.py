"""Every stage of ZeRO, in every form, gives the numbers of plain single-process training."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from lockstep import Accelerator
from parallel import zero_problem as problem
from parallel.plain import full as full
from parallel.small_groups import groups_in_stage_3

# Of the forms beside the plain stages: a mistake in one shows in the first steps.
FEW_STEPS = {"adamw": 6, "sgd": 4}


@dataclass(frozen=True)
class Case:
    world_size: int
    parallel: str
    accumulation: int

    @property
    def steps(self) -> dict[str, int]:
        return problem.STEPS if self in STAGES else FEW_STEPS

    def __str__(self) -> str:
        return f"{self.world_size}x-{self.parallel.replace(' ', '-')}-accumulate{self.accumulation}"


STAGES = [Case(2, "zero=1", 3), Case(2, "zero=2", 1), Case(2, "zero=3", 3), Case(4, "zero=3", 1)]
CASES = [
    *STAGES,
    Case(4, "zero=1 replicate=2", 3),
    Case(4, "zero=3 replicate=2", 3),
    Case(4, "zero=3 hpz=2", 3),
    Case(2, "zero=3 offload", 3),
    Case(2, "zero=2 activation=full", 3),
    Case(2, "zero=3 activation=full", 1),
    Case(1, "zero=3 activation=selective", 3),
    Case(2, "ddp activation=full", 3),
]


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def train(case: Case, optimizer_name: str) -> problem.Result:
    """The script as a user writes it; runs on each rank."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.accumulation, parallel=case.parallel)
    model = problem.make_model()
    optimizer = problem.make_optimizer(optimizer_name, model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    with groups_in_stage_3(case.parallel, problem.PAIR_BYTES):
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    result = problem.Result([], [], {}, {})
    own_losses: list[torch.Tensor] = []
    steps = case.steps[optimizer_name]
    for tokens, labels in problem.make_batches(steps * case.accumulation):
        with accelerator.accumulate(model):
            loss = problem.loss_of(model, tokens.chunk(world_size)[rank], labels.chunk(world_size)[rank])
            accelerator.backward(loss)
            own_losses.append(loss.detach())
            if accelerator.sync_gradients:
                if len(own_losses) == steps * case.accumulation:
                    result.gradients = gradients_of(accelerator.unwrap_model(model))
                result.norms.append(accelerator.clip_grad_norm_(model.parameters(), problem.CLIP).item())
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.scheduler.step()  # once a step, as in the plain loop
            optimizer.zero_grad()
    means = accelerator.reduce(torch.stack(own_losses), "mean")
    result.losses = means.view(steps, case.accumulation).mean(1).tolist()
    result.parameters = {n: full(p) for n, p in accelerator.unwrap_model(model).named_parameters()}
    return result


def train_with_both(case: Case) -> dict[str, problem.Result]:
    return {optimizer_name: train(case, optimizer_name) for optimizer_name in case.steps}


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=str,
)
def test_training_equals_plain_single_process_training(run_distributed, case: Case) -> None:
    found = run_distributed(train_with_both, case.world_size, case)
    for optimizer_name, steps in case.steps.items():
        expected = problem.train(optimizer_name, case.accumulation, steps)
        results = [of_rank[optimizer_name] for of_rank in found]
        for result in results:
            assert result.losses == pytest.approx(expected.losses, rel=2e-6)
            assert result.norms == pytest.approx(expected.norms, rel=1e-5)
            assert problem.difference(result.gradients, expected.gradients) < 1e-5
            if optimizer_name == "sgd":
                assert problem.difference(result.parameters, expected.parameters) < 1e-5
        for result in results[1:]:
            assert problem.difference(result.parameters, results[0].parameters) == 0
