"""With ``sync_batchnorm`` two processes give the numbers of plain torch on one, also where they have unequal rows."""

from __future__ import annotations

import copy

import torch
from torch import nn

from lockstep import Accelerator
from lockstep.errors import ConfigError
from tests.refusals import expect_refusal

STEPS, ROWS, RANK_0 = 4, 8, 5  # rows of a batch, and how many of them rank 0 has


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6)
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 2, 6, 6, generator=generator), torch.randn(ROWS, 6, generator=generator)


def plain() -> tuple[nn.Module, torch.Tensor]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, model.eval()(batch(STEPS)[0]).detach()


def prepared(parallel: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    accelerator = Accelerator(cpu=True, parallel=f"{parallel} sync_batchnorm")
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    mine = slice(RANK_0) if accelerator.is_main_process else slice(RANK_0, ROWS)
    for step in range(STEPS):
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x[mine]), y[mine])
        accelerator.backward(loss, weight=len(x[mine]))
        optimizer.step()
        optimizer.zero_grad()
    output = model.eval()(batch(STEPS)[0]).detach()
    state = copy.deepcopy(accelerator.get_state_dict(model))
    accelerator.free_memory()
    return state, output


def on_two_ranks() -> dict[str, tuple[dict[str, torch.Tensor], torch.Tensor]]:
    return {parallel: prepared(parallel) for parallel in ("ddp", "zero=1", "zero=3")}


def test_two_processes_normalise_as_one_does(run_distributed) -> None:
    model, expected = plain()
    for ranks in run_distributed(on_two_ranks, 2):
        for parallel, (state, output) in ranks.items():
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5, msg=parallel)
            for name, value in state.items():  # only rank 0 gets the whole state under zero
                torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-5, atol=1e-5, msg=name)


def test_a_pipeline_refuses_it() -> None:
    expect_refusal(ConfigError, "Drop sync_batchnorm", Accelerator, cpu=True, parallel="pp=2 sync_batchnorm")
