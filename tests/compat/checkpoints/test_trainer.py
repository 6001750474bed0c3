"""A folder that transformers' Trainer has written is read: weights, optimizer, schedule, generators and steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.compat.checkpoints import read_foreign
from lockstep.errors import CheckpointError

TRAIN = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 8
arguments = TrainingArguments(sys.argv[1], max_steps=3, save_steps=3, report_to=[], use_cpu=True, disable_tqdm=True)
Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows).train()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("trainer")
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, made], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return made / "checkpoint-3"


def test_the_trainers_state_is_read(folder: Path) -> None:
    found = read_foreign(folder)
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    (optimizer,) = found.optimizers
    moments = [state["exp_avg"] for state in optimizer["state"].values()]
    expected = [state["exp_avg"] for state in saved["state"].values()]
    assert len(expected) > 5
    assert all(torch.equal(a, b) for a, b in zip(moments, expected, strict=True))
    assert (found.layout, found.step, found.world_size) == ("transformers' Trainer", 3, 1)
    assert found.schedulers[0]["last_epoch"] == 3
    generators = torch.load(folder / "rng_state.pth", weights_only=False)
    assert torch.equal(torch.as_tensor(found.rng[0]["torch"]), generators["cpu"])
    assert len(found.models[0]) >= len(expected)
    assert any(note.startswith("training_args.bin: left out") for note in found.notes)


def test_a_state_without_its_number_of_steps_is_refused(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "trainer_state.json").write_text('{"global_step": "three"}')
    with pytest.raises(CheckpointError, match="it has no global_step"):
        read_foreign(tmp_path)
