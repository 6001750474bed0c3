"""sentence-transformers: a tiny BERT that learns to embed sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from cell import Result, cell, quiet, save_once, sentences, tokenizer, trained
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import (
    CachedMultipleNegativesRankingLoss,
    CosineSimilarityLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer


def embedder(folder: Path) -> SentenceTransformer:
    transformers.set_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    place = folder / "bert"
    model = transformers.BertModel(config)
    save_once(lambda: (model.save_pretrained(place), tokenizer().save_pretrained(place)))
    words = Transformer(str(place), max_seq_length=16)
    return SentenceTransformer(modules=[words, Pooling(words.get_embedding_dimension())], device="cpu")


def train(folder: Path, loss: Any, **columns: Any) -> Result:
    model = embedder(folder)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=15,
            learning_rate=1e-3,
            adam_epsilon=1e-5,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            eval_strategy="steps",
            eval_steps=5,
            seed=3,
        ),
        train_dataset=Dataset.from_dict(
            {"one": sentences(48, 4, 10, 1), "two": sentences(48, 4, 10, 2), **columns}
        ),
        eval_dataset=Dataset.from_dict(
            {
                "one": sentences(8, 4, 10, 1),
                "two": sentences(8, 4, 10, 2),
                **{k: v[:8] for k, v in columns.items()},
            }
        ),
        loss=loss(model),
    )
    quiet(trainer).train()
    return trained(trainer)


@cell
def ranking(folder: Path) -> Result:
    return train(folder, MultipleNegativesRankingLoss)


@cell
def cached_ranking(folder: Path) -> Result:
    return train(folder, lambda model: CachedMultipleNegativesRankingLoss(model, mini_batch_size=2))


@cell
def similarity(folder: Path) -> Result:
    return train(folder, CosineSimilarityLoss, score=[number % 10 / 10 for number in range(48)])
