"""Arguments of ``transformers.Trainer`` that ask for what is not offered: refused by name before training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.friends.packages import deepspeed_package

# name of a case -> (arguments of TrainingArguments, as Python, or a variable), and what the error must name
CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "fp8": ("", "ACCELERATE_MIXED_PRECISION=fp8", ("fp8",)),
    "XLA": ("fsdp='full_shard', fsdp_config={'xla': True}", "", ("torch_xla",)),
    "words of loaders": ("accelerator_config={'split_batches': 'false'}", "", ("split_batches", "'false'")),
    "dispatching": ("accelerator_config={'dispatch_batches': 'no'}", "", ("dispatch_batches", "'no'")),
    "an unknown key": ("accelerator_config={'even_batch': True}", "", ("even_batch",)),
    "accumulation": (
        "accelerator_config={'gradient_accumulation_kwargs': {'steps': 2}}", "", ("steps",)
    ),
    "more ranks than processes": (
        "parallelism_config=ParallelismConfig(dp_shard_size=3)", "", ("dp_shard_size=3", "3 ranks", "1 processes")
    ),
    "ranks of a tensor split": (
        "parallelism_config=ParallelismConfig(tp_size=2)", "", ("tp_size=2", "2 ranks", "1 processes")
    ),
    "a sequence split twice": (
        "parallelism_config=ParallelismConfig(cp_size=2, sp_size=2)", "", ("cp_size=2", "sp_size=2")
    ),
    "an engine for sequences": (
        "parallelism_config=ParallelismConfig(sp_size=2, sp_backend='torch')", "", ("sp_backend", "'torch'")
    ),
    "a compiler": ("torch_compile=True, torch_compile_backend='indctor'", "", ("indctor", "inductor")),
    "a mode of compiling": (
        "torch_compile=True, torch_compile_backend='inductor', torch_compile_mode='fast'", "", ("fast", "max-autotune")
    ),
    "a kind of state dicts": (
        "fsdp='full_shard', fsdp_config={'state_dict_type': 'SOME'}", "", ("state_dict_type", "SOME")
    ),
    "a DeepSpeed schedule": (
        "deepspeed={'zero_optimization': {'stage': 2}, 'scheduler': {'type': 'WarmupLR', 'params': {}}}",
        "", ("scheduler", "WarmupLR", "lr_scheduler_type")
    ),
    "a DeepSpeed optimizer with another rate": (
        "learning_rate=0.1, deepspeed={'optimizer': {'type': 'AdamW', 'params': {'lr': 0.2}}}",
        "", ("optimizer.params.lr=0.2", "learning_rate=0.1")
    ),
    "DeepSpeed with another window": (
        "gradient_accumulation_steps=3, deepspeed={'gradient_accumulation_steps': 2}",
        "", ("gradient_accumulation_steps=2", "gradient_accumulation_steps=3")
    ),
    "a DeepSpeed optimizer that torch lacks": (
        "deepspeed={'optimizer': {'type': 'Lamb', 'params': {}}}", "", ("Lamb", "AdamW")
    ),
    "an unknown key of DeepSpeed": ("deepspeed={'zero_optimization': {'stge': 2}}", "", ("stge",)),
    "FSDP and DeepSpeed": (
        "fsdp=True, deepspeed={'zero_optimization': {'stage': 2}}", "", ("fsdp", "deepspeed")
    ),
    # The last: it removes the package.
    "DeepSpeed without the package": (
        "deepspeed=without_package({'zero_optimization': {'stage': 2}})", "", ("deepspeed",)
    ),
}  # fmt: skip
ACCEPTED = {
    "DeepSpeed": "deepspeed={'zero_optimization': {'stage': 3}, 'train_batch_size': 'auto'}",
    "nothing": "",
    "truth values": "accelerator_config={'split_batches': False, 'dispatch_batches': None, 'even_batches': True}",
    "axes of one": "parallelism_config=ParallelismConfig()",
}

SCRIPT = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
import torch
import transformers
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(4)]
usual = "use_cpu=True, max_steps=1, report_to=[], save_strategy='no', logging_strategy='no', disable_tqdm=True"
found = {}

def without_package(config):
    sys.path.remove(os.path.abspath("packages"))
    return config

for name, (arguments, variable) in json.loads(sys.argv[1]).items():
    before = dict(os.environ)
    os.environ.update([variable.split("=")] if variable else [])
    AcceleratorState._reset_state(True)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8))
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        made = eval(f"TrainingArguments('out', {usual}, {arguments})")
        Trainer(model, made, train_dataset=rows).train()
        message = ""
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    trained = any(not torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    found[name] = [message, trained]
    os.environ.clear()
    os.environ.update(before)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, bool]]:
    """Case -> (the error, whether weights changed)."""
    folder: Path = tmp_path_factory.mktemp("trainer")
    (folder / "train.py").write_text(SCRIPT)
    asked = {name: (arguments, "") for name, arguments in ACCEPTED.items()}
    asked |= {name: (arguments, variable) for name, (arguments, variable, _) in CASES.items()}
    packages = deepspeed_package(folder)
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), packages]))
    done = subprocess.run(
        [sys.executable, "-m", "lockstep.compat.accelerate", "train.py", json.dumps(asked)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, tuple[str, bool]] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_offered_is_refused_by_name_before_training(
    name: str, found: dict[str, tuple[str, bool]]
) -> None:
    message, trained = found[name]
    assert [word for word in CASES[name][2] if word not in message] == [], message
    assert not trained


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_offered_trains(name: str, found: dict[str, tuple[str, bool]]) -> None:
    assert tuple(found[name]) == ("", True)
