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
from cell import CELLS, Result, cell, gpt2, gpt2_config, sentences, tokenizer
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


def preferred(folder: Path, module: str, name: str) -> Result:
    trainer, config = named(module, name)
    rows = {**prompted(), **pairs()} | ({"reference": sentences(24, 5, 5, 4)} if module == "tpo" else {})
    return train(
        trainer(
            model=gpt2(),
            args=config(**settings(folder, max_steps=6), max_length=24),
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer(),
        )
    )


for word in ("orpo", "cpo", "tpo"):
    CELLS[word] = lambda folder, word=word: preferred(folder, word, word.upper())


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
def gmpo(folder: Path) -> Result:
    return from_rewards(*named("gmpo", "GMPO"), folder)


def generated(
    folder: Path, names: tuple[str, str], steps: int, further: Any, rows: Any, words: Any, **options: Any
) -> Result:
    trainer, config = named(*names)
    return train(
        trainer(
            model=from_folder(folder),
            args=config(**settings(folder, max_steps=steps), **options),
            train_dataset=Dataset.from_dict({**prompted(), **rows}),
            processing_class=words,
            **further,
        )
    )


REWARDED = {"reward_funcs": varied}
CELLS["online_dpo"] = lambda folder: generated(
    folder, ("online_dpo", "OnlineDPO"), 3, REWARDED, {}, tokenizer(), max_new_tokens=6, max_length=24
)
CELLS["a2po"] = lambda folder: generated(
    folder, ("a2po", "A2PO"), 4, REWARDED, {}, tokenizer(), num_value_samples=2, max_completion_length=6
)
DISTILLED = {"max_completion_length": 6, "num_generations": 4, "distillation_topk": 8}
CELLS["sdpo"] = lambda folder: generated(folder, ("sdpo", "SDPO"), 4, REWARDED, {}, talking(), **DISTILLED)
CELLS["sdft"] = lambda folder: generated(
    folder, ("sdft", "SDFT"), 4, {}, {"privileged_context": sentences(24, 4, 4, 3)}, tokenizer(), **DISTILLED
)
