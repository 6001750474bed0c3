"""A model split in every way, and in products of them, has the numbers of plain single-process training."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep import Accelerator
from parallel import split_problem as problem
from parallel.plain import full


@dataclass(frozen=True)
class Case:
    world_size: int
    parallel: str
    model: str = "gpt"
    accumulation: int = 1
    optimizer: str = "adamw"
    steps: int = problem.STEPS
    precision: str = "no"

    @property
    def layers(self) -> int:
        return 4 if "pp" in self.parallel else 2

    def __str__(self) -> str:
        words = self.parallel.replace(" ", "-")
        precision = "" if self.precision == "no" else f"-{self.precision}"
        return f"{self.world_size}x-{self.model}-{words}-{self.optimizer}-accumulate{self.accumulation}{precision}"


CASES = [
    Case(2, "tp=2 sequence_parallel", "llama", steps=3),
    Case(2, "tp=2 tp_plan=infer loss_parallel", "llama", steps=3),
    Case(2, "tp=2 sequence_parallel loss_parallel compile=blocks", steps=2),
    Case(4, "tp=4 sequence_parallel loss_parallel activation=selective", steps=3),
    Case(4, "zero=3 tp=2 sequence_parallel loss_parallel activation=full", "llama", steps=3),
    Case(2, "cp=2 activation=selective", steps=3),
    Case(4, "zero=3 cp=2 cp_method=ulysses activation=full", "llama", steps=3),
    Case(4, "zero=3 pp=2", steps=3),
    Case(2, "cp=2 cp_method=ulysses"),
    Case(4, "pp=4", "llama", steps=3),
    Case(4, "zero=3 tp=2", steps=4, accumulation=2),
    Case(4, "pp=2", steps=4, accumulation=2),
    Case(4, "cp=2", steps=4, accumulation=2),
    Case(4, "ep=2", "experts", steps=4, accumulation=2),
    Case(2, "", "experts"),
    Case(2, "zero=3 compile=blocks", steps=4, accumulation=2),
]


def train(case: Case) -> problem.Result:
    """The script as a user writes it; runs on each rank."""
    torch.set_num_threads(1)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=case.accumulation,
        parallel=case.parallel,
        mixed_precision=case.precision,
        split_batches=True,
        # Inductor takes ten times as long.
        dynamo_backend="aot_eager" if "compile" in case.parallel else None,
    )
    model = problem.MODELS[case.model](case.layers)
    optimizer = problem.make_optimizer(model, case.optimizer)
    rows = problem.make_batches(case.steps * case.accumulation).flatten(0, 1)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(rows, batch_size=problem.ROWS)
    )
    result = problem.Result([], [], {}, {})
    window: list[float] = []
    for tokens in loader:
        with accelerator.accumulate(model):
            loss = problem.loss_of(case.model, model, tokens)
            accelerator.backward(loss)
            window.append(accelerator.reduce(loss.detach(), "mean").item())
            if accelerator.sync_gradients:
                plain = accelerator.unwrap_model(model)
                result.gradients = {
                    n: full(p.grad) for n, p in plain.named_parameters() if p.grad is not None
                }
                result.norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                result.losses.append(sum(window) / len(window))
                window = []
            optimizer.step()
            optimizer.zero_grad()
    result.parameters = {n: full(p) for n, p in accelerator.unwrap_model(model).named_parameters()}
    return result


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_equals_plain_single_process_training(run_distributed, case: Case) -> None:
    expected = problem.train(case.model, case.steps, case.accumulation, case.optimizer, layers=case.layers)
    results = run_distributed(train, case.world_size, case, timeout_s=150)
    found: set[str] = set()
    for result in results:
        assert result.losses == pytest.approx(expected.losses, rel=5e-6)
        assert result.norms == pytest.approx(expected.norms, rel=2e-5)
        assert problem.difference(result.gradients, expected.gradients) < 1e-5
        found |= result.gradients.keys()
    assert found == expected.gradients.keys()
