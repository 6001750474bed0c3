"""Losses that are sums, counters and notes where the stages of a pipeline are sharded too: plain torch's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Accelerator
from tests.verify import rows

MODELS: dict[str, Callable[[], nn.Module]] = {
    "sum": lambda: rows.LanguageModel(reduction="sum"),
    "counter": lambda: rows.LanguageModel("counter"),
    "note": lambda: rows.LanguageModel("note"),
}
STEPS, RATE = 3, {"sum": 1e-4}


def trained(model: Any, call: Any, optimizer: Any, backward: Any) -> list[float]:
    """All ranks have the same batches, so that their mean is that of one process."""
    losses = []
    for step in range(STEPS):
        numbers = torch.Generator().manual_seed(step)
        ids, labels = (torch.randint(rows.WORDS, (rows.ROWS, rows.ROWS), generator=numbers) for _ in range(2))
        loss = call(ids, labels)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def made(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, torch.optim.SGD(model.parameters(), RATE.get(name, 0.1))


def difference(parallel: str, precision: str) -> dict[str, tuple[float, float, list[float]]]:
    """Of losses, and of weights by the size of their change; counters of this rank."""
    torch.set_num_threads(1)
    found = {}
    for name in MODELS:
        plain, steps = made(name)
        start = {key: value.detach().clone() for key, value in plain.named_parameters()}
        wanted = trained(plain, plain, steps, lambda loss: loss.backward())
        moved = {key: (value.detach() - start[key]).norm().item() for key, value in plain.named_parameters()}
        accelerator = Accelerator(cpu=True, parallel=parallel, mixed_precision=precision)
        user, optimizer = made(name)
        model, optimizer = accelerator.prepare(user, optimizer)
        losses = trained(user, model, optimizer, accelerator.backward)
        state = accelerator.get_state_dict(model)
        apart = [
            (
                (state[key].float() - value.detach()).norm() / max(moved[key], 1e-2 * max(moved.values()))
            ).item()
            for key, value in plain.named_parameters()
            if key in state
        ]
        counts = [value.item() for key, value in user.named_buffers() if key == "blocks.1.calls"]
        loss = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
        found[name] = (loss, max(apart, default=0.0), counts)
        accelerator.free_memory()
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("parallel", "precision", "tolerance"),
    [("zero=1 pp=2", "no", 1e-4), ("zero=3 pp=2", "no", 1e-4), ("zero=1 pp=2", "bf16", 0.1)],
)
def test_stages_that_are_sharded_train_as_one_process_does(
    run_distributed: Any, parallel: str, precision: str, tolerance: float
) -> None:
    for found in run_distributed(difference, 4, parallel, precision, timeout_s=240):
        wrong = {name: one for name, one in found.items() if max(one[:2]) > tolerance}
        assert wrong == {}
        assert found["counter"][2] in ([], [STEPS]) and found["sum"][2] in ([], [0])
