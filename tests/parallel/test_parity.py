"""The parity matrix: every strategy gives the numbers of plain single-process training."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lockstep import Accelerator, DataLoaderConfiguration
from parallel import plain

GLOBAL_BATCH = 8
STEPS = 20
OPTIMIZERS = ("adamw", "sgd")


@dataclass(frozen=True)
class Case:
    world_size: int
    precision: str
    accumulation: int
    data: str  # map, dispatched or sharded (the last two iterate over a stream)

    def __str__(self) -> str:
        return f"{self.world_size}x-{self.precision}-accumulate{self.accumulation}-{self.data}"


CASES = [
    # Each pair of values of the settings.
    Case(1, "no", 1, "map"),
    Case(1, "bf16", 3, "dispatched"),
    Case(1, "no", 3, "sharded"),
    Case(1, "bf16", 1, "sharded"),
    Case(2, "no", 3, "map"),
    Case(2, "bf16", 1, "map"),
    Case(2, "no", 1, "dispatched"),
    Case(2, "bf16", 3, "sharded"),
    Case(4, "no", 1, "map"),
    Case(4, "bf16", 3, "dispatched"),
    Case(4, "no", 3, "sharded"),
]


def train(case: Case, optimizer_name: str) -> plain.Result:
    """The script as a user writes it; runs on each rank."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=case.precision,
        gradient_accumulation_steps=case.accumulation,
        dataloader_config=DataLoaderConfiguration(
            data_seed=plain.SEED, dispatch_batches={"dispatched": True, "sharded": False}.get(case.data)
        ),
    )
    model = plain.make_model()
    optimizer = plain.make_optimizer(optimizer_name, model)
    loader = DataLoader(
        plain.make_dataset(case.data),
        batch_size=GLOBAL_BATCH // accelerator.num_processes,
        shuffle=case.data == "map",
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    own_losses: list[torch.Tensor] = []
    gradients: dict[str, torch.Tensor] = {}
    steps = 0
    for tokens, labels in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(tokens), labels)
            accelerator.backward(loss)
            own_losses.append(loss.detach())
            if accelerator.sync_gradients:
                plain_model = accelerator.unwrap_model(model)
                gradients = {name: p.grad.clone() for name, p in plain_model.named_parameters()}
                steps += 1
            optimizer.step()
            optimizer.zero_grad()
        if steps == STEPS:
            break
    means = accelerator.reduce(torch.stack(own_losses), "mean")
    losses = means.view(steps, case.accumulation).mean(1).tolist()
    parameters = {n: p.detach().clone() for n, p in accelerator.unwrap_model(model).named_parameters()}
    return plain.Result(losses, gradients, parameters)


def train_with_both(case: Case) -> dict[str, plain.Result]:
    return {optimizer_name: train(case, optimizer_name) for optimizer_name in OPTIMIZERS}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_equals_plain_single_process_training(run_distributed, case: Case) -> None:
    bf16 = case.precision == "bf16"
    found = run_distributed(train_with_both, case.world_size, case)
    for optimizer_name in OPTIMIZERS:
        expected = plain.train(
            "map" if case.data == "map" else "iterable",
            optimizer_name,
            case.accumulation,
            STEPS,
            GLOBAL_BATCH,
            bf16,
            slices=case.world_size if bf16 else 1,
        )
        results = [of_rank[optimizer_name] for of_rank in found]
        for result in results:
            assert result.losses == pytest.approx(expected.losses, rel=2e-6)
            if optimizer_name == "sgd":
                assert plain.difference(result.gradients, expected.gradients) < 1e-5
                assert plain.difference(result.parameters, expected.parameters) < 1e-5
        for result in results[1:]:
            assert plain.difference(result.parameters, results[0].parameters) == 0
