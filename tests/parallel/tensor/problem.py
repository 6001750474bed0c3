"""Tiny models and the plain training loop that tensor-parallel training must equal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.plain import difference as difference
from parallel.plain import full as whole

VOCABULARY, LENGTH, BATCH, WIDTH, LAYERS, HEADS = 61, 16, 4, 32, 2, 4


class Attention(nn.Module):
    """As in examples/gpt: query, key and value in one layer, the width of a head from the input's shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width), nn.Dropout(0.0)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """The output is tied to the embedding without a module of its own."""

    def __init__(self, heads: int = HEADS, hidden: int = 4 * WIDTH, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, heads, hidden) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.token(tokens) + self.position(positions)))
        return F.linear(x, self.token.weight)


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gpt":
        return GPT()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=kind == "tied-llama",
    )
    return LlamaForCausalLM(config)


def plan_splits_embedding(model: Any) -> bool:
    """Whether the plan that transformers brings has the embedding; that of version 5.20 for an untied Llama did not."""
    return "model.embed_tokens" in model.tp_plan


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    shape = (BATCH, LENGTH)
    return [
        (
            torch.randint(VOCABULARY, shape, generator=numbers),
            torch.randint(VOCABULARY, shape, generator=numbers),
        )
        for _ in range(steps)
    ]


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """The line of a plain loop; a transformers model computes the loss itself."""
    if isinstance(model, GPT):
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())
    loss: Tensor = model(input_ids=tokens, labels=labels).loss
    return loss


@dataclass
class Result:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)


def train(
    model: nn.Module,
    steps: int = 8,
    rows: slice = slice(None),
    accumulation: int = 1,
    bf16: bool = False,
    **optimizer: Any,
) -> Result:
    result = Result()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, **optimizer)
    window = batches(steps * accumulation)
    for number, (tokens, labels) in enumerate(window, start=1):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = loss_of(model, tokens[rows], labels[rows])
        (loss / accumulation).backward()
        result.losses.append(loss.item())
        if number % accumulation == 0:
            result.norms.append(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)).item())
            result.gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
            adam.step()
            adam.zero_grad()
    return result


def loss_difference(actual: list[float], expected: list[float]) -> float:
    assert len(actual) == len(expected)
    return max(abs(a - e) / abs(e) for a, e in zip(actual, expected, strict=True))
