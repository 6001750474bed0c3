"""Calls within ``maybe_context_parallel`` are proved too: the whole batch is known from the buffers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Accelerator
from lockstep.errors import UsageError
from tests.parallel.split_problem import LENGTH, VOCABULARY, make_batches, make_llama
from tests.verify.cells import Messages

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class OwnModel(nn.Module):
    """Its batch is a dictionary, and tensors run along other dims; ``kind``: what is done after the blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.kind = nn.Embedding(VOCABULARY, WIDTH), kind
        self.table = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: dict[str, Tensor]) -> Any:
        x = self.embed(batch["tokens"]) + self.table(batch["positions"])[None]
        for block in self.blocks:
            x = block(x)
        if self.kind == "pooled":
            x = x + x.mean(1, keepdim=True)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        if self.kind == "sum":
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        return (loss, logits) if self.kind != "outputs" else logits


def own(parallel: str, kind: str) -> list[str]:
    """What is said in two training calls of different lengths, or raised."""
    torch.set_num_threads(1)
    messages = Messages()
    logger = logging.getLogger("lockstep.verify")
    logger.addHandler(messages)
    logger.setLevel(logging.INFO)
    accelerator = Accelerator(cpu=True, parallel=parallel)
    model = OwnModel(kind)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for number, length in enumerate((LENGTH, LENGTH - 4)):
        tokens = make_batches(2)[number][:, :length] if kind != "none in buffers" else torch.ones(2, 8).long()
        # Of another length on other data ranks.
        tokens = tokens[:, 4 * accelerator.meshes.data_rank :].contiguous()
        labels, positions = F.pad(tokens[:, 1:], (0, 1)), torch.arange(tokens.shape[1])
        buffers = [tokens, labels, positions]
        kept = {labels}
        with accelerator.maybe_context_parallel(buffers, [1, 1, 0], kept):
            if kind == "none in buffers":
                tokens, labels, positions = tokens.clone(), labels.clone(), positions.clone()
            if kind == "not a buffer":
                labels = labels.clone()
            try:
                output = model({"tokens": tokens, "labels": labels, "positions": positions})
            except UsageError as error:
                return [str(error)]
            loss = (
                output[0]
                if isinstance(output, tuple)
                else F.cross_entropy(output.flatten(0, 1), labels.flatten())
            )
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return messages.texts


SAID = {
    "loss": "was verified on the first batch: loss and 16 gradients",
    "outputs": "was verified on the first batch: outputs and 16 gradients",
    "sum": "(1/2 of it)",
    "pooled": "does not compute what the whole model does",
    "none in buffers": "could not be verified on the first batch: no argument of the model is one of the buffers",
    "not a buffer": "could not be verified on the first batch: the whole model raises",
}


def all_kinds(parallel: str) -> dict[str, list[str]]:
    return {kind: own(parallel, kind) for kind in SAID}


def test_the_first_batch_is_proved(run_distributed: Any) -> None:
    line = "cp=2 cp_method=ring verify=every:1"
    for rank, found in enumerate(run_distributed(all_kinds, 2, line, timeout_s=120)):
        for kind, texts in found.items():
            if rank > 0 and kind not in ("sum", "pooled"):
                assert texts == []
                continue
            assert SAID[kind] in texts[0], texts
            if kind in ("sum", "pooled"):
                assert "that has positions in buffers" in texts[0]
            if kind in ("loss", "outputs"):
                assert "was verified in training call 2" in texts[1]


def uneven(divides: bool) -> str:
    torch.set_num_threads(1)
    messages = Messages()
    logging.getLogger("lockstep.verify").addHandler(messages)
    accelerator = Accelerator(cpu=True, parallel="cp=2")
    model = accelerator.prepare(make_llama(1))
    tokens = make_batches(1)[0]
    labels, positions = F.pad(tokens[:, 1:], (0, 1), value=-100), torch.arange(LENGTH)[None]
    count = {"num_items_in_batch": (labels != -100).sum() / 2} if divides else {}
    with accelerator.maybe_context_parallel([tokens, labels, positions], [1, 1, 1]):
        try:
            model(input_ids=tokens, position_ids=positions, labels=labels, shift_labels=labels, **count)
        except UsageError as error:
            return str(error)
    return " ".join(messages.texts)


def test_labels_that_are_left_out_need_their_number(run_distributed: Any) -> None:
    assert "was verified on the first batch: loss" in run_distributed(uneven, 2, True)[0]
    for text in run_distributed(uneven, 2, False):
        assert "the loss is" in text and "pass num_items_in_batch" in text


def labels_twice(parallel: str) -> str:
    """As scripts for ``ParallelismConfig``: no mask, and one tensor as labels and as shifted labels."""
    torch.set_num_threads(1)
    messages = Messages()
    logging.getLogger("lockstep.verify").addHandler(messages)
    accelerator = Accelerator(cpu=True, parallel=parallel, mixed_precision="bf16")
    model = accelerator.prepare(make_llama(1))
    tokens = make_batches(1)[0]
    labels, positions = F.pad(tokens[:, 1:], (0, 1), value=1), torch.arange(LENGTH)[None]
    buffers = [tokens, labels, labels, positions]
    with accelerator.maybe_context_parallel(buffers, [1, 1, -1, 1], set(buffers)):
        assert labels.shape[1] == LENGTH // 2
        output = model(input_ids=tokens, position_ids=positions, labels=labels, shift_labels=labels)
        accelerator.backward(output.loss)
    with pytest.raises(UsageError, match=r"buffers\[1\].*buffers\[0\]"):
        with accelerator.maybe_context_parallel([tokens, tokens], [1, 0]):
            pass
    return " ".join(messages.texts)


def test_a_tensor_that_is_two_arguments_is_split_once(run_distributed: Any) -> None:
    assert "was verified on the first batch: loss" in run_distributed(labels_twice, 2, "zero=3 cp=2")[0]
