"""Time that goes to other ranks, and that measures add no collective."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from lockstep import Accelerator
from lockstep.nn import MixtureOfExperts

SLOW_S = 0.3


def steps_with_a_slow_rank(parallel: str) -> list[dict[str, float]]:
    """Rank 1 is slow in each forward; what rank 0 waits for it is communication."""
    accelerator = Accelerator(parallel=parallel)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(batch).square().mean()
        if accelerator.process_index == 1:
            time.sleep(SLOW_S)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.gather(loss.detach())
    accelerator.end_training()
    return [step.seconds for step in accelerator.measures.recent if step.seconds is not None]


def test_waiting_for_a_slow_rank_is_communication(run_distributed: Any) -> None:
    for parallel in ("ddp", "zero=3"):
        quick, slow = run_distributed(steps_with_a_slow_rank, 2, parallel)
        # rank 1 is less late where the machine holds up rank 0
        assert statistics.median(seconds["communication"] for seconds in quick) >= 0.5 * SLOW_S, (
            parallel,
            quick,
        )
        assert all(seconds["forward"] >= SLOW_S for seconds in slow)


class AttentionBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inner(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return x + mixed.transpose(1, 2).flatten(2)


def model_for(parallel: str) -> torch.nn.Module:
    if parallel.startswith("tp"):
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    if parallel.startswith("cp"):
        return torch.nn.Sequential(AttentionBlock(), AttentionBlock())
    return torch.nn.Sequential(MixtureOfExperts(8, 16, num_experts=4, top_k=2), torch.nn.Linear(8, 1))


def steps_of_a_split_model(parallel: str) -> list[dict[str, float]]:
    """Rank 1 comes late to each forward, in whose middle rank 0 waits for it."""
    accelerator = Accelerator(parallel=parallel)
    model: Any = model_for(parallel)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        if accelerator.process_index == 1:
            time.sleep(SLOW_S)
        accelerator.backward(model(torch.randn(2, 8, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return [step.seconds for step in accelerator.measures.recent if step.seconds is not None]


def test_waiting_inside_of_a_split_model_is_communication(run_distributed: Any) -> None:
    for parallel in ("tp=2 verify=off", "cp=2 verify=off", "cp=2 cp_method=ulysses verify=off", "ep=2"):
        quick, _ = run_distributed(steps_of_a_split_model, 2, parallel, timeout_s=120)
        # rank 1 is less late where the machine holds up rank 0
        assert statistics.median(seconds["communication"] for seconds in quick) >= 0.5 * SLOW_S, (
            parallel,
            quick,
        )
        for seconds in quick:
            assert abs(sum(v for part, v in seconds.items() if part != "total") - seconds["total"]) <= 1e-9


def test_what_cannot_be_told_apart_is_absent(run_distributed: Any) -> None:
    for steps in run_distributed(steps_with_a_slow_rank, 2, "pp=2"):
        for seconds in steps:
            assert "communication" not in seconds and "forward" not in seconds
            rest = sum(value for part, value in seconds.items() if part != "total")
            assert seconds["forward_backward"] > 0 and abs(rest - seconds["total"]) <= 1e-9


def collectives_of_steps(measured: bool) -> list[tuple[str, int]]:
    """Of five steps, with clipping, as ``communication`` records them."""
    accelerator = Accelerator()
    model: Any = torch.nn.Linear(8, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = torch.utils.data.DataLoader(torch.randn(20, 8), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if not measured:
        clock = accelerator.gradient_state.clock
        clock.enter = lambda part: part
        clock.at_step.clear()
        clock.at_batch.clear()
    found: list[tuple[str, int]] = []
    for batch in loader:
        with accelerator.communication() as counter:
            accelerator.backward(model(batch).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found += [(record.operation, record.payload_bytes) for record in counter.records]
    return found


def test_measures_add_no_collective(run_distributed: Any) -> None:
    with_measures = run_distributed(collectives_of_steps, 2, True)
    assert with_measures == run_distributed(collectives_of_steps, 2, False)
    # One all-reduce of the gradients a step, 9 numbers: DDP's own.
    assert with_measures[0].count(("all_reduce", 36)) == 5
