"""Trains a T5 to translate, and generates in evaluation: which digits occur in "4 1 1 7"? "1 4 7".

    lockstep launch --nproc 2 examples/recipes/seq2seq.py

Answers have different lengths, on one process and between processes. `gather_for_metrics` takes them as lists, and
brings each question's answer once. So the score is that of the whole validation set, whatever the number of processes.
In training each token counts alike, however long its sentence is.

For a real model: `AutoModelForSeq2SeqLM.from_pretrained("google-t5/t5-small")`, with its tokenizer in `collate`.
"""

from __future__ import annotations

import argparse
import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration

from lockstep import Accelerator
from lockstep.utils import set_seed

PAD, END, FIRST_DIGIT = 0, 1, 2  # token ids
IGNORED = -100  # the label of padding
LONGEST = 8  # digits of a question

Example = tuple[list[int], list[int]]


def examples(number: int, seed: int) -> list[Example]:
    """Questions of 1 to 8 digits, and their digits in order, each once; as tokens."""
    draw = random.Random(seed)
    questions = [[draw.randrange(10) for _ in range(draw.randint(1, LONGEST))] for _ in range(number)]
    return [
        ([FIRST_DIGIT + digit for digit in q], [FIRST_DIGIT + d for d in sorted(set(q))]) for q in questions
    ]


def collate(batch: list[Example]) -> dict[str, Tensor]:
    """Tokens [rows, LONGEST + 1] that end with END, padded."""
    questions = padded([question for question, _ in batch], PAD)
    labels = padded([answer for _, answer in batch], IGNORED)
    return {"input_ids": questions, "attention_mask": (questions != PAD).long(), "labels": labels}


def padded(rows: list[list[int]], filling: int) -> Tensor:
    return torch.tensor([[*row, END] + [filling] * (LONGEST - len(row)) for row in rows])


def make_model() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=FIRST_DIGIT + 10, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.0,
            pad_token_id=PAD, eos_token_id=END, decoder_start_token_id=PAD,
        )
    )  # fmt: skip


def sentences(rows: Tensor) -> list[list[int]]:
    """The digits of each row of tokens [rows, longest]; with a tokenizer: ``batch_decode``."""
    return [[token for token in row if token >= FIRST_DIGIT] for row in rows.tolist()]


def token_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """[rows, LONGEST + 1]; 0 of padding."""
    logits = model(**batch).logits
    return F.cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=IGNORED, reduction="none")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--parallel", default="ddp", help='how the model is spread, for example "zero=3"')
    parser.add_argument("--batch-size", type=int, default=64, help="questions per step, over all processes")
    parser.add_argument(
        "--questions", type=int, default=3000, help="to train on; a tenth as many to validate"
    )
    args = parser.parse_args()

    accelerator = Accelerator(parallel=args.parallel, split_batches=True)
    set_seed(0)
    train = DataLoader(examples(args.questions, seed=1), args.batch_size, shuffle=True, collate_fn=collate)
    validation = DataLoader(examples(args.questions // 10, seed=2), args.batch_size, collate_fn=collate)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, train, validation = accelerator.prepare(model, optimizer, train, validation)

    for epoch in range(args.epochs):
        model.train()
        for batch in train:
            is_sample = accelerator.sample_weights()[:, None]  # 0 for rows that only fill up the last batch
            losses = token_losses(model, batch)
            accelerator.backward(losses, weight=(batch["labels"] != IGNORED) * is_sample)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        sums, pairs = [], []
        for batch in validation:
            with torch.no_grad():
                losses = token_losses(model, batch).sum(1)
                answers = accelerator.unwrap_model(model).generate(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    max_new_tokens=LONGEST + 1,
                    do_sample=False,
                )
            counts = (batch["labels"] != IGNORED).sum(1)
            sums.append(accelerator.gather_for_metrics(torch.stack([losses, counts], dim=1)))
            both = zip(sentences(answers), sentences(batch["labels"]), strict=True)
            pairs += accelerator.gather_for_metrics(list(both))
        loss, tokens = torch.cat(sums).double().sum(0).tolist()
        accuracy = sum(answer == truth for answer, truth in pairs) / len(pairs)
        length = sum(len(answer) for answer, _ in pairs) / len(pairs)
        accelerator.print(
            f"epoch {epoch + 1}: loss {loss / tokens:.6f}, accuracy {accuracy:.4f} on {len(pairs)} questions, "
            f"answers of {length:.4f} digits"
        )


if __name__ == "__main__":
    main()
