"""``transformers.Trainer`` and ``Seq2SeqTrainer``, with PEFT's adapters as well, small."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from cell import Result, cell, gpt2, quiet, trained
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset):
    def __init__(self, count: int, seed: int, shortest: int = 8, longest: int = 8) -> None:
        source = torch.Generator().manual_seed(seed)
        self.rows = [
            torch.randint(
                3, 64, (int(torch.randint(shortest, longest + 1, (1,), generator=source)),), generator=source
            )
            for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence([row["labels"] for row in rows], True, -100)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def arguments(folder: Path, kind: Any = TrainingArguments, **given: Any) -> Any:
    return kind(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "gradient_accumulation_steps": int(os.environ.get("CELLS_WINDOW", "2")),
            "max_steps": 12,
            "learning_rate": 1e-3,
            # Some biases have a gradient of zero but for rounding, which Adam would make a step of full size.
            "adam_epsilon": 1e-5,
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            "seed": 3,
            **given,
        }
    )


def train(folder: Path, resume: str | None = None, model: Any = None, **given: Any) -> Result:
    lengths = (4, 12) if given.get("train_sampling_strategy") else (8, 8)
    trainer = quiet(
        Trainer(
            model=model or gpt2(),
            args=arguments(folder, **given),
            train_dataset=Tokens(48, 1, *lengths),
            eval_dataset=Tokens(11, 2),
            data_collator=padded,
        )
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.evaluate()
    return trained(trainer)


@cell
def plain(folder: Path) -> Result:
    """Dropout, accumulation, clipping, evaluation."""
    return train(folder, max_steps=30, max_grad_norm=0.5, eval_strategy="steps", eval_steps=10)


@cell
def epochs(folder: Path) -> Result:
    """Epochs whose last window is shorter, a schedule with warmup, another optimizer."""
    return train(
        folder,
        max_steps=-1,
        num_train_epochs=3,
        gradient_accumulation_steps=4,
        warmup_steps=3,
        lr_scheduler_type="cosine",
        optim="sgd",
        learning_rate=0.1,
    )


@cell
def bf16(folder: Path) -> Result:
    return train(folder, bf16=True)


@cell
def workers(folder: Path) -> Result:
    return train(folder, max_steps=8, dataloader_num_workers=2)


@cell
def by_length(folder: Path) -> Result:
    """Without dropout: batches of varying length let it draw different numbers on the ranks, after which ranks of
    Accelerate draw different orders of samples.
    """
    return train(folder, model=gpt2(dropout=0.0), train_sampling_strategy="group_by_length")


@cell
def by_length_dropout(folder: Path) -> Result:
    """With dropout, one epoch."""
    return train(folder, train_sampling_strategy="group_by_length", max_steps=3)


@cell
def best(folder: Path) -> Result:
    return train(
        folder,
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=4,
        learning_rate=0.02,
        save_total_limit=1,
    )


@cell
def saved(folder: Path) -> Result:
    """Leaves ``checkpoint-4`` and ``checkpoint-8``."""
    return train(folder, save_strategy="steps", save_steps=4)


@cell
def resumed(folder: Path) -> Result:
    """Goes on from the first checkpoint of ``saved``."""
    origin = folder.parent / folder.name.replace("resumed", "saved")
    return train(folder, resume=str(origin / "checkpoint-4"))


@cell
def kept(folder: Path) -> Result:
    """As ``saved``, without dropout: of that, other numbers of processes draw other masks."""
    return train(folder, model=gpt2(dropout=0.0), save_strategy="steps", save_steps=4)


@cell
def taken_up(folder: Path) -> Result:
    origin = Path(os.environ.get("CELLS_FROM", folder.parent)) / folder.name.replace("taken_up", "kept")
    return train(folder, model=gpt2(dropout=0.0), resume=str(origin / "checkpoint-4"))


@cell
def recompute(folder: Path) -> Result:
    return train(folder, gradient_checkpointing=True)


def lora_model() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(gpt2(), LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"))


@cell
def lora(folder: Path) -> Result:
    return train(folder, model=lora_model(), learning_rate=0.02)


@cell
def ia3(folder: Path) -> Result:
    from peft import IA3Config, get_peft_model

    config = IA3Config(
        target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"], task_type="CAUSAL_LM"
    )
    return train(folder, model=get_peft_model(gpt2(), config), learning_rate=0.05)


@cell
def prompt(folder: Path) -> Result:
    from peft import PromptTuningConfig, get_peft_model

    config = PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    return train(folder, model=get_peft_model(gpt2(), config), learning_rate=0.05)


@cell
def t5(folder: Path) -> Result:
    """An encoder-decoder that generates when it is evaluated."""
    transformers.set_seed(0)
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=1,
        )
    )

    def metrics(predicted: Any) -> dict[str, float]:
        ids = predicted.predictions
        return {"sum": float(ids[ids > 0].sum()), "rows": float(len(ids))}

    trainer = quiet(
        Seq2SeqTrainer(
            model=model,
            args=arguments(
                folder,
                Seq2SeqTrainingArguments,
                predict_with_generate=True,
                generation_max_length=6,
                max_steps=6,
            ),
            train_dataset=Tokens(48, 1),
            eval_dataset=Tokens(11, 2),
            data_collator=padded,
            compute_metrics=metrics,
        )
    )
    trainer.train()
    trainer.evaluate()
    return trained(trainer)


@cell
def classification(folder: Path) -> Result:
    """BERT with batches of varying length, and predictions that are gathered."""
    transformers.set_seed(0)
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
    )

    class Labelled(Tokens):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"input_ids": self.rows[index], "labels": self.rows[index][:1] % 3}

    def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {**padded(rows), "labels": torch.cat([row["labels"] for row in rows])}

    trainer = quiet(
        Trainer(
            model=transformers.BertForSequenceClassification(config),
            args=arguments(folder, eval_strategy="steps", eval_steps=6),
            train_dataset=Labelled(48, 1, 4, 12),
            eval_dataset=Labelled(11, 2, 4, 12),
            data_collator=collate,
            compute_metrics=lambda predicted: {
                "accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean()),
                "rows": float(len(predicted.label_ids)),
            },
        )
    )
    trainer.train()
    predicted = trainer.predict(Labelled(5, 3, 4, 12))
    logged, weights = trained(trainer)
    return [*logged, {"predicted": float(predicted.predictions.sum()), **predicted.metrics}], weights
