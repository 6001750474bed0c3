"""Pretrains a BERT by masked language modelling: it guesses the bytes that were hidden from it.

    lockstep launch --nproc 2 examples/recipes/masked_lm.py

Masking is dynamic: each epoch hides other bytes. Which ones depends on the seed, the epoch and the number of the
sample, so that every number of processes hides the same. Samples have different numbers of hidden bytes; with its
weight, each hidden byte counts alike.

For a real model: `BertForMaskedLM.from_pretrained("google-bert/bert-base-uncased")`, with its tokenizer's ids.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForMaskedLM

from data import text_windows
from lockstep import Accelerator
from lockstep.utils import set_seed

MASK, VOCABULARY, LENGTH = 256, 257, 48  # tokens are the 256 bytes, and the mask
IGNORED = -100  # the label of a byte that was not hidden


class Masked(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and labels [length] of windows of text: 15% are to be guessed, of which 80% are masked, 10% random."""

    def __init__(self, windows: Dataset[Tensor], seed: int) -> None:
        self.windows, self.seed, self.epoch = windows, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """A prepared loader calls it as each epoch begins."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.windows[index]
        # Of this sample among those of all epochs.
        number = (self.seed * 1000 + self.epoch) * len(self) + index
        generator = torch.Generator().manual_seed(number)
        hidden, how = torch.rand(2, len(window), generator=generator)
        random = torch.randint(256, window.shape, generator=generator)
        is_hidden = hidden < 0.15
        shown = torch.where(how < 0.8, MASK, torch.where(how < 0.9, random, window))
        return torch.where(is_hidden, shown, window), torch.where(is_hidden, window, IGNORED)


def make_model() -> nn.Module:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY, max_position_embeddings=LENGTH, hidden_size=64, intermediate_size=128,
            num_hidden_layers=2, num_attention_heads=4, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        )
    )  # fmt: skip


def token_losses(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """[rows, length]: the loss of each byte, 0 of those that were not hidden."""
    logits = model(input_ids=inputs).logits
    return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="windows per step, over all processes")
    parser.add_argument("--windows", type=int, default=2000, help="windows of an epoch")
    args = parser.parse_args()

    accelerator = Accelerator(split_batches=True)
    set_seed(0)
    train_text, held_out = text_windows(LENGTH, args.windows, args.windows // 8)
    train = DataLoader(Masked(train_text, seed=1), args.batch_size, shuffle=True)
    validation = DataLoader(Masked(held_out, seed=2), args.batch_size)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, train, validation = accelerator.prepare(model, optimizer, train, validation)

    for epoch in range(args.epochs):
        model.train()
        for inputs, labels in train:
            is_sample = accelerator.sample_weights()[:, None]  # 0 for rows that only fill up the last batch
            losses = token_losses(model, inputs, labels)
            accelerator.backward(losses, weight=(labels != IGNORED) * is_sample)
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        validation.set_epoch(0)  # the same bytes are hidden in every validation
        sums = []
        for inputs, labels in validation:
            with torch.no_grad():
                losses = token_losses(model, inputs, labels).sum(1)
            sums.append(accelerator.gather_for_metrics(torch.stack([losses, (labels != IGNORED).sum(1)], 1)))
        loss, hidden = torch.cat(sums).double().sum(0).tolist()
        accelerator.print(f"epoch {epoch + 1}: loss {loss / hidden:.6f} on {hidden:.0f} hidden bytes")


if __name__ == "__main__":
    main()
