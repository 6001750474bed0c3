"""A `transformers` classifier that tells documentation from code, trained from scratch.

    lockstep launch --nproc 2 examples/text_classifier.py --epochs 3

Nothing is downloaded: the model starts from a config, the tokens are bytes, the text is the docstrings and
function bodies of Python's standard library. The metrics count each validation passage exactly once.
"""

from __future__ import annotations

import argparse
import ast
import random
import sysconfig
from pathlib import Path

import torch
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import DistilBertConfig, DistilBertForSequenceClassification

from lockstep import Accelerator
from lockstep.utils import set_seed

LABELS = ["code", "documentation"]
PAD, START, FIRST_BYTE = 0, 1, 2  # token ids: two special ones, then the 256 bytes
LENGTH = 96  # tokens of a passage


def passages(limit: int) -> list[tuple[str, int]]:
    """Up to `limit` (text, label) pairs, half code and half documentation, in a fixed random order."""
    found: list[tuple[str, int]] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
                continue
            if documentation := ast.get_docstring(node):
                code = "\n".join(ast.unparse(statement) for statement in node.body[1:])
                found += [(code, 0), (documentation, 1)]
        if len(found) >= 2 * limit:
            break
    random.Random(0).shuffle(found)
    return found[:limit]


def collate(pairs: list[tuple[str, int]]) -> dict[str, Tensor]:
    """Byte tokens, padded to the longest passage of the batch."""
    rows = [[START, *(FIRST_BYTE + byte for byte in text.encode()[: LENGTH - 1])] for text, _ in pairs]
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([row + [PAD] * (longest - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
        "labels": torch.tensor([label for _, label in pairs]),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--limit", type=int, default=2500, help="passages, a fifth of them for validation")
    parser.add_argument("--batch-size", type=int, default=32, help="passages per step, over all processes")
    args = parser.parse_args()

    accelerator = Accelerator(split_batches=True)
    set_seed(0)
    data = passages(args.limit)
    cut = len(data) // 5
    train = DataLoader(data[cut:], args.batch_size, shuffle=True, drop_last=True, collate_fn=collate)
    validation = DataLoader(data[:cut], 2 * args.batch_size, collate_fn=collate)

    config = DistilBertConfig(
        vocab_size=FIRST_BYTE + 256, max_position_embeddings=LENGTH, num_labels=len(LABELS), pad_token_id=PAD,
        dim=64, hidden_dim=128, n_layers=2, n_heads=4,
    )  # fmt: skip
    model = DistilBertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    steps = args.epochs * len(train)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    model, optimizer, scheduler, train, validation = accelerator.prepare(
        model, optimizer, scheduler, train, validation
    )

    for epoch in range(args.epochs):
        model.train()
        total = torch.zeros((), device=accelerator.device)
        for batch in train:
            optimizer.zero_grad()
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            total += loss.detach()
        train_loss = accelerator.reduce(total / len(train), "mean")

        model.eval()
        predictions, labels = [], []
        for batch in validation:
            with torch.no_grad():
                guess = model(**batch).logits.argmax(dim=1)
            guess, truth = accelerator.gather_for_metrics((guess, batch["labels"]))
            predictions += guess.tolist()
            labels += truth.tolist()
        accelerator.print(
            f"epoch {epoch + 1}: train loss {train_loss:.4f}, "
            f"accuracy {accuracy_score(labels, predictions):.4f}, F1 {f1_score(labels, predictions):.4f} "
            f"on {len(labels)} of {cut} passages"
        )


if __name__ == "__main__":
    main()
