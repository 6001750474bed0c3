"""``save_pretrained`` of models whose weights are split over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from lockstep import Accelerator
from lockstep.errors import UsageError


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
