"""Time that goes to other ranks, and that measures add no collective."""

from __future__ import annotations

import time
from typing import Any

import torch

from lockstep import Accelerator

SLOW_S = 0.3


def steps_with_a_slow_rank(parallel: str) -> list[dict[str, float]]:
    """Rank 1 is slow in each forward; what rank 0 waits for it is communication."""
    accelerator = Accelerator(parallel=parallel)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = torch.utils.data.DataLoader(torch.randn(12, 8), batch_size=2)
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
    return [step.seconds for step in accelerator.measures._recent if step.seconds is not None]


def test_waiting_for_a_slow_rank_is_communication(run_distributed: Any) -> None:
    for parallel in ("ddp", "zero=3"):
        quick, slow = run_distributed(steps_with_a_slow_rank, 2, parallel)
        for seconds in quick:
            # not less than it slept, whatever else the machine does
            assert seconds["communication"] >= 0.8 * SLOW_S, (parallel, seconds)
        assert all(seconds["forward"] >= SLOW_S for seconds in slow)


def test_what_cannot_be_told_apart_is_absent(run_distributed: Any) -> None:
    for parallel in ("tp=2", "pp=2"):
        for steps in run_distributed(steps_with_a_slow_rank, 2, parallel):
            for seconds in steps:
                assert "communication" not in seconds
                rest = sum(value for part, value in seconds.items() if part != "total")
                assert abs(rest - seconds["total"]) <= 1e-9
                assert ("forward_backward" in seconds) == (parallel == "pp=2")
                assert ("forward" in seconds) == (parallel != "pp=2")


def collectives_of_steps(measured: bool) -> list[tuple[str, int]]:
    """Of five steps, with clipping, as ``communication`` records them."""
    accelerator = Accelerator()
    model: Any = torch.nn.Linear(8, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = torch.utils.data.DataLoader(torch.randn(20, 8), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if not measured:
        clock = accelerator.gradient_state.clock
        clock.parts = None
        clock.at_step.clear()
        clock.at_batch.clear()
    found: list[tuple[str, int]] = []
    for batch in loader:
        with accelerator.communication() as ledger:
            accelerator.backward(model(batch).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found += [(record.operation, record.payload_bytes) for record in ledger.records]
    return found


def test_measures_add_no_collective(run_distributed: Any) -> None:
    with_measures = run_distributed(collectives_of_steps, 2, True)
    assert with_measures == run_distributed(collectives_of_steps, 2, False)
    # One all-reduce of the gradients a step, 9 numbers: DDP's own.
    assert with_measures[0].count(("all_reduce", 36)) == 5
