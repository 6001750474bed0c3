"""What loading costs grows with the number of tensors, not with its square: counted, not timed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Accelerator
from lockstep.checkpoint import Checkpoint
from lockstep.checkpoint.format import TensorReader
from tests.patching import module_of


class Average:
    """A registered object with many small tensors."""

    def __init__(self, count: int) -> None:
        self.values = {f"p{i}": torch.full((2,), float(i)) for i in range(count)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = {name: value.clone() for name, value in state.items()}


def counted(folder: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often files are opened and headers asked in one load, and how many pieces are looked through."""
    accelerator, average = Accelerator(cpu=True), Average(count)
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.register_for_checkpointing(average)
    accelerator.save_state(folder)
    average.values = {name: torch.zeros(2) for name in average.values}
    calls: Counter[str] = Counter()

    def noted(name: str, original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return original(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("describe", "read"):
            patch.setattr(TensorReader, name, noted(name, getattr(TensorReader, name)))
        patch.setattr(module_of(Checkpoint), "TensorReader", noted("open", TensorReader))
        patch.setattr(Checkpoint, "fill", noted("fill", Checkpoint.fill))
        accelerator.load_state(folder)
    assert all(torch.equal(value, Average(count).values[name]) for name, value in average.values.items())
    return calls


def test_the_tensors_of_an_object_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (counted(tmp_path / str(count), count, monkeypatch) for count in (10, 200))
    assert many["open"] == few["open"] <= 2
    assert many["fill"] == few["fill"]
    assert many["read"] - few["read"] == many["describe"] - few["describe"] == 190
