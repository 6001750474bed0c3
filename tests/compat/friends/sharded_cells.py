"""``fsdp=`` and ``deepspeed=`` among the arguments of ``transformers.Trainer``; ``whole`` is that run without them."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cell import CELLS, Result, cell, gpt2, quiet, save_once, trained
from trainer_cells import Tokens, arguments, padded
from transformers import Trainer

# name -> (arguments of TrainingArguments, what they are here)
FSDP: dict[str, tuple[dict[str, Any], str]] = {
    "full_shard": ({"fsdp": "full_shard auto_wrap"}, "zero=3"),
    "shard_grad_op": ({"fsdp": "shard_grad_op auto_wrap"}, "zero=2"),
    "reshard": (
        {"fsdp": True, "fsdp_config": {"reshard_after_forward": False, "state_dict_type": "FULL_STATE_DICT"}},
        "zero=2",
    ),
    "offload": (
        {"fsdp": "full_shard offload", "fsdp_config": {"transformer_layer_cls_to_wrap": "GPT2Block"}},
        "zero=3 offload",
    ),
    "by_size": (
        {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 2000}}, "zero=3"
    ),
    "no_wrap": ({"fsdp": True, "fsdp_config": {"auto_wrap_policy": "NO_WRAP"}}, "zero=3"),
    "recompute": (
        {"fsdp": True, "fsdp_config": {"activation_checkpointing": True, "cpu_ram_efficient_loading": True}}, "zero=3"
    ),
    "version_1": (
        {
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {
                "version": 1, "backward_prefetch": "backward_pre", "forward_prefetch": True, "use_orig_params": True,
                "sync_module_states": True, "limit_all_gathers": True,
            },
        },
        "zero=3",
    ),
    "version_1_grad": ({"fsdp": "shard_grad_op", "fsdp_config": {"version": 1}}, "zero=2"),
    "sharded_states": ({"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}, "zero=3"),
}  # fmt: skip

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
BUCKETS = {
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
WRITTEN = {"lr": 0.02, "betas": [0.9, 0.999], "eps": 1e-5, "weight_decay": 0.0}
# name -> (configuration, what it is here)
DEEPSPEED: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"zero_optimization": {"stage": 0}}, ""),
    "1": ({"zero_optimization": {"stage": 1}}, "zero=1"),
    "2": (
        {
            "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
            "optimizer": ADAMW,
            "fp16": {"enabled": "auto"},
            "bf16": {"enabled": "auto"},
        },
        "zero=2",
    ),
    "2_offload": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}},
        "zero=2 offload=optimizer",
    ),
    "3": (
        {
            "zero_optimization": {"stage": 3, **BUCKETS, "stage3_gather_16bit_weights_on_model_save": True},
            "optimizer": {"type": "Adam", "params": WRITTEN},
        },
        "zero=3",
    ),
    "3_offload": (
        {
            "zero_optimization": {
                "stage": 3, **BUCKETS, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}
            },
            "optimizer": ADAMW,
        },
        "zero=3 offload",
    ),
}  # fmt: skip


def train(folder: Path, expected: str | None = None, resume: Path | None = None, **given: Any) -> Result:
    """Trains, evaluates while it does and after it, saves and predicts.

    Without dropout: of that, other numbers of processes draw other masks.
    """
    trainer = quiet(
        Trainer(
            model=gpt2(dropout=0.0),
            args=arguments(
                folder,
                **{
                    "eval_strategy": "steps",
                    "eval_steps": 4,
                    "save_strategy": "steps",
                    "save_steps": 4,
                    "learning_rate": 0.02,
                    "max_grad_norm": 0.5,
                    **given,
                },
            ),
            train_dataset=Tokens(48, 1),
            eval_dataset=Tokens(11, 2),
            data_collator=padded,
        )
    )
    if expected is not None:
        assert set(expected.split()) <= set(str(trainer.accelerator.parallel).split()), (
            trainer.accelerator.parallel
        )
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    trainer.evaluate()
    predicted = trainer.predict(Tokens(5, 3))
    logged, weights = trained(trainer)
    return [*logged, {"sum": float(abs(predicted.predictions).sum()), **predicted.metrics}], weights


@cell
def whole(folder: Path) -> Result:
    return train(folder, load_best_model_at_end=True)


@cell
def whole_last(folder: Path) -> Result:
    return train(folder)


@cell
def last_fsdp(folder: Path) -> Result:
    """Whose checkpoints have the model alone."""
    result = train(folder, "zero=3", fsdp=True, save_only_model=True)
    found = {path.name for path in (folder / "checkpoint-4").iterdir()}
    assert "model.safetensors" in found and not any(name.startswith("optimizer") for name in found), found
    return result


@cell
def last_taken_up_fsdp(folder: Path) -> Result:
    """By ``--parallel``: on one process Trainer refuses ``fsdp=``."""
    return train(folder, "zero=3", _origin("fsdp_full_shard"))


@cell
def last_taken_up_deepspeed(folder: Path) -> Result:
    config = AUTO | {"zero_optimization": {"stage": 2}, "optimizer": ADAMW}
    return train(folder, "zero=2", _origin("deepspeed_3"), deepspeed=config)


def _origin(name: str) -> Path:
    return Path(os.environ["CELLS_FROM"]) / name / "checkpoint-4"


def _add(name: str, arguments: Callable[[Path], dict[str, Any]], expected: str) -> None:
    CELLS[name] = lambda folder: train(folder, expected, load_best_model_at_end=True, **arguments(folder))


def _as_file(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "deepspeed.json"
    folder.mkdir(parents=True, exist_ok=True)
    save_once(lambda: file.write_text(json.dumps(config)))
    return str(file)


for name, (given, expected) in FSDP.items():
    _add(f"fsdp_{name}", lambda folder, given=given: copy.deepcopy(given), expected)
for name, (config, expected) in DEEPSPEED.items():
    _add(
        f"deepspeed_{name}",
        lambda folder, config=config: {"deepspeed": copy.deepcopy(AUTO | config)},
        expected,
    )
config, expected = DEEPSPEED["2"]
_add("deepspeed_2", lambda folder: {"deepspeed": _as_file(folder, AUTO | config)}, expected)
