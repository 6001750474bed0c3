"""Trainers of ``trl.experimental``, and distillation, small.

The installed TRL has no PPO. Those that need a server (asynchronous ones), a tokenizer of bytes (GOLD) or of the Hub
(IWOPD) are left out.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import transformers
import trl
from cell import Result, cell, gpt2, gpt2_config, sentences, tokenizer
from datasets import Dataset
from trl_cells import from_folder, from_rewards, pairs, prompted, settings, train, varied

CHAT = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"


def named(module: str, name: str) -> tuple[Any, Any]:
    """A trainer and its configuration."""
    found = importlib.import_module(f"trl.experimental.{module}")
    return getattr(found, f"{name}Trainer"), getattr(found, f"{name}Config")


def talking() -> Any:
    """A tokenizer of conversations."""
    made = tokenizer()
    made.chat_template = CHAT
    return made


def teacher() -> Any:
    transformers.set_seed(1)
    return transformers.GPT2LMHeadModel(gpt2_config(dropout=0.0))


def conversations() -> Dataset:
    asked, said = sentences(24, 4, 4, 1), sentences(24, 5, 5, 2)
    return Dataset.from_dict(
        {
            "messages": [
                [{"role": "user", "content": one}, {"role": "assistant", "content": other}]
                for one, other in zip(asked, said, strict=True)
            ]
        }
    )


@cell
def orpo(folder: Path) -> Result:
    trainer, config = named("orpo", "ORPO")
    return train(
        trainer(
            model=gpt2(),
            args=config(**settings(folder, max_steps=6), max_length=24),
            train_dataset=Dataset.from_dict({**prompted(), **pairs()}),
            processing_class=tokenizer(),
        )
    )


@cell
def cpo(folder: Path) -> Result:
    trainer, config = named("cpo", "CPO")
    return train(
        trainer(
            model=gpt2(),
            args=config(**settings(folder, max_steps=6), max_length=24),
            train_dataset=Dataset.from_dict({**prompted(), **pairs()}),
            processing_class=tokenizer(),
        )
    )


@cell
def tpo(folder: Path) -> Result:
    trainer, config = named("tpo", "TPO")
    rows = {**prompted(), **pairs(), "reference": sentences(24, 5, 5, 4)}
    return train(
        trainer(
            model=gpt2(),
            args=config(**settings(folder, max_steps=6), max_length=24),
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer(),
        )
    )


@cell
def online_dpo(folder: Path) -> Result:
    trainer, config = named("online_dpo", "OnlineDPO")
    return train(
        trainer(
            model=from_folder(folder),
            reward_funcs=varied,
            args=config(**settings(folder, max_steps=3), max_new_tokens=6, max_length=24),
            train_dataset=Dataset.from_dict(prompted()),
            processing_class=tokenizer(),
        )
    )


@cell
def gkd(folder: Path) -> Result:
    trainer, config = named("gkd", "GKD")
    return train(
        trainer(
            model=gpt2(),
            teacher_model=teacher(),
            args=config(**settings(folder, max_steps=4), max_length=24, max_new_tokens=6),
            train_dataset=conversations(),
            processing_class=talking(),
        )
    )


@cell
def distillation(folder: Path) -> Result:
    return train(
        trl.DistillationTrainer(
            model=from_folder(folder),
            teacher_model=teacher(),
            args=trl.DistillationConfig(**settings(folder, max_steps=4), max_completion_length=6),
            train_dataset=Dataset.from_dict(prompted()),
            processing_class=tokenizer(),
        )
    )


@cell
def sdft(folder: Path) -> Result:
    trainer, config = named("sdft", "SDFT")
    rows = {**prompted(), "privileged_context": sentences(24, 4, 4, 3)}
    return train(
        trainer(
            model=from_folder(folder),
            args=config(
                **settings(folder, max_steps=4),
                max_completion_length=6,
                num_generations=4,
                distillation_topk=8,
            ),
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer(),
        )
    )


@cell
def gmpo(folder: Path) -> Result:
    return from_rewards(*named("gmpo", "GMPO"), folder)


@cell
def a2po(folder: Path) -> Result:
    trainer, config = named("a2po", "A2PO")
    return train(
        trainer(
            model=from_folder(folder),
            reward_funcs=varied,
            args=config(**settings(folder, max_steps=4), num_value_samples=2, max_completion_length=6),
            train_dataset=Dataset.from_dict(prompted()),
            processing_class=tokenizer(),
        )
    )


@cell
def sdpo(folder: Path) -> Result:
    trainer, config = named("sdpo", "SDPO")
    return train(
        trainer(
            model=from_folder(folder),
            reward_funcs=varied,
            args=config(
                **settings(folder, max_steps=4),
                max_completion_length=6,
                num_generations=4,
                distillation_topk=8,
            ),
            train_dataset=Dataset.from_dict(prompted()),
            processing_class=talking(),
        )
    )
