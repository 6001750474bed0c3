"""Names of parameters and buffers that the format of the files keeps for itself, or that collide there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Accelerator
from lockstep.checkpoint.store import LocalStore, verify_checkpoint
from lockstep.checkpoint.weights import open_weights
from lockstep.errors import UsageError
from lockstep.utils import save
from tests.refusals import expect_refusal

ODD = [
    "__metadata__",
    "__metadata__'",
    "\ud800",
    "\\ud800",
    "ä\0\n\x1b[2J",
    "weight@0x0",
    "weight@2x0",
    "weight@0",
    "x" * 5000,
]


class Odd(nn.Module):
    """A layer with parameters and buffers of odd names."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))
        for number, name in enumerate(names):
            if number % 2 or "@" in name:
                self.register_buffer(name, torch.full((4, 3), float(number)))
            else:
                self.register_parameter(name, nn.Parameter(torch.full((4, 3), float(number))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((x @ tensor.T).sum() for tensor in (*self.parameters(), *self.buffers()))


def trained(parallel: str | None) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True, parallel=parallel)
    # torch's own DDP cannot hold half of a pair.
    model = Odd([name for name in ODD if parallel != "ddp" or name != "\ud800"])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 3)))
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model


def whole(accelerator: Accelerator, model: Any) -> dict[str, torch.Tensor]:
    found = accelerator.unwrap_model(model).state_dict()
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for name, t in found.items()}


def save_and_load(directory: str, parallel: str | None) -> list[str]:
    accelerator, model = trained(parallel)
    before = whole(accelerator, model)
    accelerator.save_state(directory)
    with torch.no_grad():
        for tensor in accelerator.unwrap_model(model).state_dict().values():
            (tensor.to_local() if hasattr(tensor, "to_local") else tensor).fill_(-7.0)
    verify_checkpoint(LocalStore(), directory)
    accelerator.load_state(directory)
    after = whole(accelerator, model)
    expect_refusal(UsageError, "'__metadata__'", accelerator.save_model, model, f"{directory}-weights")
    assert not list(Path(f"{directory}-weights").glob("*.safetensors*"))
    return [name for name in before if not torch.equal(before[name], after[name])]


@pytest.mark.parametrize(("world_size", "parallel"), [(1, None), (2, "ddp"), (2, "zero=3")])
def test_any_name_of_a_tensor_is_saved_and_loaded(
    run_distributed: Any, tmp_path: Path, world_size: int, parallel: str | None
) -> None:
    directory = str(tmp_path / "state")
    for differing in run_distributed(save_and_load, world_size, directory, parallel):
        assert differing == []
    expect_refusal(UsageError, "'__metadata__'", open_weights, directory)


@pytest.mark.parametrize("name", ["__metadata__", "\udfff"])
def test_names_that_other_programs_could_not_read_are_refused_before_a_file_is_there(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(UsageError):
        save({name: torch.ones(1)}, tmp_path / "file", safe_serialization=True)
    assert not (tmp_path / "file").exists()
