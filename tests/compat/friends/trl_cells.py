"""TRL's trainers, small: a GPT-2 with dropout, on sentences of random words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
import trl
from cell import Result, cell, gpt2, gpt2_config, quiet, save_once, sentences, tokenizer, trained
from datasets import Dataset
from peft import LoraConfig


def settings(folder: Path, **given: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-5,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "seed": 3,
        **given,
    }


def train(trainer: Any) -> Result:
    quiet(trainer).train()
    return trained(trainer)


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM")


def from_folder(folder: Path) -> str:
    """Where the model lies, for trainers that load it a second time as their reference."""
    place = str(folder / "gpt2")
    save_once(lambda: gpt2().save_pretrained(place))
    return place


def pairs() -> dict[str, list[str]]:
    return {"chosen": sentences(24, 5, 5, 2), "rejected": sentences(24, 5, 5, 3)}


def prompted() -> dict[str, list[str]]:
    return {"prompt": sentences(24, 4, 4, 1)}


@cell
def sft(folder: Path, peft_config: Any = None) -> Result:
    texts = Dataset.from_dict({"text": sentences(40, 5, 12, 1)})
    return train(
        trl.SFTTrainer(
            model=gpt2(),
            args=trl.SFTConfig(**settings(folder, eval_strategy="steps", eval_steps=6), max_length=16),
            train_dataset=texts,
            eval_dataset=texts.select(range(10)),
            processing_class=tokenizer(),
            peft_config=peft_config,
        )
    )


@cell
def sft_lora(folder: Path) -> Result:
    return sft(folder, lora())


@cell
def dpo(folder: Path, peft_config: Any = None) -> Result:
    return train(
        trl.DPOTrainer(
            model=from_folder(folder),
            args=trl.DPOConfig(**settings(folder), max_length=24),
            train_dataset=Dataset.from_dict({**prompted(), **pairs()}),
            processing_class=tokenizer(),
            peft_config=peft_config,
        )
    )


@cell
def dpo_lora(folder: Path) -> Result:
    return dpo(folder, lora())


@cell
def kto(folder: Path) -> Result:
    labelled = {"completion": sentences(24, 5, 5, 2), "label": [number % 2 == 0 for number in range(24)]}
    return train(
        trl.KTOTrainer(
            model=from_folder(folder),
            args=trl.KTOConfig(**settings(folder), max_length=24),
            train_dataset=Dataset.from_dict({**prompted(), **labelled}),
            processing_class=tokenizer(),
        )
    )


@cell
def reward(folder: Path) -> Result:
    transformers.set_seed(0)
    return train(
        trl.RewardTrainer(
            model=transformers.GPT2ForSequenceClassification(gpt2_config(num_labels=1)),
            args=trl.RewardConfig(**settings(folder), max_length=24),
            train_dataset=Dataset.from_dict(pairs()),
            processing_class=tokenizer(),
        )
    )


def varied(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


def from_rewards(trainer: Any, config: Any, folder: Path) -> Result:
    return train(
        trainer(
            model=from_folder(folder),
            reward_funcs=varied,
            args=config(
                **settings(folder, max_steps=4), num_generations=4, max_completion_length=6, beta=0.1
            ),
            train_dataset=Dataset.from_dict(prompted()),
            processing_class=tokenizer(),
        )
    )


@cell
def grpo(folder: Path) -> Result:
    return from_rewards(trl.GRPOTrainer, trl.GRPOConfig, folder)


@cell
def rloo(folder: Path) -> Result:
    return from_rewards(trl.RLOOTrainer, trl.RLOOConfig, folder)
