"""A script with transformers' Trainer, which counts the batches of a step itself."""

from __future__ import annotations

import sys
import tempfile

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Texts(Dataset[dict[str, Tensor]]):
    """The same number of tokens in each row."""

    def __init__(self) -> None:
        self.rows = torch.randint(0, 32, (64, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[number], "labels": self.rows[number]}


def main(rows: int, accumulation: int) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
            num_train_epochs=4,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        Trainer(model, arguments, train_dataset=Texts()).train()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
