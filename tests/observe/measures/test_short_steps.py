"""Steps that are so short that measures look at many of them at once: each is told as if it were alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator

STEPS = 150


def train(accelerator: Accelerator) -> list[dict[str, Any]]:
    """Train a tiny model on rows of two tokens, at a rate of its own in each step; what the script itself knows."""
    model: Any = torch.nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    loader: Any = DataLoader(TensorDataset(torch.rand(3 * STEPS, 2)), batch_size=3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    known = []
    for number, (rows,) in enumerate(loader, start=1):
        optimizer.param_groups[0]["lr"] = 1 / (10 + number)
        loss = model(rows).square().mean()
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        known.append(
            {
                "step": number,
                "samples": 3,
                "loss": loss.item(),
                "gradient_norm": norm.item(),
                "learning_rate": [1 / (10 + number)],
            }
        )
        if number % 7 == 0:
            accelerator.log({"seven": number})
            known[-1]["logged"] = {"seven": number}
        optimizer.step()
        optimizer.zero_grad()
        loss.detach().zero_()  # what has been told stays as it was
    return known


def test_each_of_them_is_in_the_file_with_its_own_numbers(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, run_dir=tmp_path)
    known = train(accelerator)
    accelerator.end_training()
    lines = [json.loads(line) for line in (tmp_path / "measures.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line, expected in zip(lines, known, strict=True):
        for name, value in expected.items():  # six decimals are written
            assert line[name] == (value if isinstance(value, dict) else pytest.approx(value, abs=1e-6)), name
        assert ("logged" in line) == ("logged" in expected)
        assert line["seconds"]["total"] > 0
    # Of the first step nothing is counted; all others compute the same: 2 * 2 * 3 forward, as much for the weights.
    assert {line["flops"]["model"] for line in lines[1:]} == {24}
    times = [line["time"] for line in lines]
    assert times == sorted(times)


def test_the_latest_are_there_where_nothing_is_written() -> None:
    accelerator = Accelerator(cpu=True)
    known = train(accelerator)
    latest = accelerator.measures.latest
    assert latest is not None
    assert (latest.step, latest.loss) == (STEPS - 1, known[-2]["loss"])  # the last one has no boundary yet
    assert [step.step for step in accelerator.measures.recent][-40:] == list(range(STEPS - 40, STEPS))
    assert [step.loss for step in accelerator.measures.recent][-40:] == [one["loss"] for one in known[-41:-1]]
