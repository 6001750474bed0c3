"""What is saved of models whose weights are split over ranks, by ``save_pretrained`` and ``Accelerator.save``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep import Accelerator
from lockstep.errors import UsageError
from tests.refusals import expect_refusal


def saved(parallel: str, folder: str) -> tuple[str, bool]:
    """The refusal, and whether what was saved with all weights is the model."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
    )
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator = Accelerator(cpu=True, parallel=parallel)
    model = accelerator.prepare(model)
    try:
        model.save_pretrained(f"{folder}/parts-{accelerator.process_index}")
        refusal = ""
    except UsageError as error:
        refusal = str(error)
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        model.save_pretrained(f"{folder}/whole", state_dict=weights)
    accelerator.wait_for_everyone()
    found = load_file(f"{folder}/whole/model.safetensors")
    return refusal, found.keys() == expected.keys() and all(
        torch.equal(value, expected[name]) for name, value in found.items()
    )


def test_parts_are_refused_and_whole_weights_saved(run_distributed: Any, tmp_path: Path) -> None:
    for number, parallel in enumerate(("tp=2", "zero=3")):
        folder = tmp_path / str(number)
        (refusal, is_whole), _ = run_distributed(saved, 2, parallel, str(folder))  # rank 0 writes
        assert "LlamaForCausalLM.save_pretrained() would save the shards of one rank" in refusal
        assert "state_dict=accelerator.get_state_dict(model)" in refusal
        assert is_whole


def saved_by_hand(parallel: str, folder: str) -> dict[str, bool]:
    """Of each object, whether the file that was there before is still whole after it was refused."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, parallel=parallel)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.0))
    accelerator.backward(model(torch.ones(4, 4)).mean())
    optimizer.step()
    plain = accelerator.unwrap_model(model)
    path = Path(folder, f"{accelerator.process_index}.pt")
    kept = {}
    objects = {"state": plain.state_dict(), "nested": {"model": plain.state_dict()}, "model": plain}
    if not parallel.startswith("pp"):  # whose optimizers have no names that could be missed
        objects["optimizer"] = {"optimizer": optimizer.state_dict(), "epoch": 1}
    else:
        del objects["model"]  # is refused by torch, which cannot pickle it
    for name, found in objects.items():
        path.write_bytes(b"before")
        for safe in (False, True) if name == "state" else (False,):
            expect_refusal(UsageError, "accelerator.save_model", accelerator.save, found, path, safe)
        if name != "model":
            expect_refusal(UsageError, "get_state_dict", torch.save, found, f"{path}.torch")
        kept[name] = path.read_bytes() == b"before" and not Path(f"{path}.part").exists()
    # What the refusal names.
    state = accelerator.get_state_dict(model)
    accelerator.save({"model": state}, f"{folder}/whole.pt")
    accelerator.save(state, f"{folder}/whole.safetensors", safe_serialization=True)
    accelerator.wait_for_everyone()
    for found in (torch.load(f"{folder}/whole.pt")["model"], load_file(f"{folder}/whole.safetensors")):
        kept["whole"] = kept.get("whole", True) and all(
            torch.equal(found[n], value) for n, value in whole.items()
        )
    return kept


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [(2, "zero=1"), (2, "zero=3"), (2, "tp=2"), (2, "pp=2"), (4, "zero=3 replicate=2"), (4, "zero=2 pp=2")],
)
def test_parts_are_never_written_by_hand(
    run_distributed: Any, tmp_path: Path, world_size: int, parallel: str
) -> None:
    for kept in run_distributed(saved_by_hand, world_size, parallel, str(tmp_path)):
        assert all(kept.values()), kept
