"""A script as users write it, that `lockstep check` runs; with a defect on the ranks of the candidate.

python training.py MODEL DEFECT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import Accelerator

sys.path.insert(0, str(Path(__file__).resolve().parent))
from planted import plant

BATCH, BATCHES, LENGTH, VOCABULARY = 4, 32, 16, 64


class Net(nn.Module):
    """A residual block between two normalisations, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(12, 24)
        self.batch_norm = nn.BatchNorm1d(24)
        self.inner = nn.Linear(24, 24)
        self.other = nn.Linear(24, 24)
        self.norm = nn.LayerNorm(24)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.batch_norm(self.enter(x)))
        x = x + self.drop(F.gelu(self.inner(x))) + self.other(x)
        return self.head(self.norm(x))


class Experts(nn.Module):
    """Two blocks with a mixture of experts each."""

    def __init__(self) -> None:
        super().__init__()
        from lockstep.nn import MixtureOfExperts

        self.embed = nn.Embedding(VOCABULARY, 16)
        self.mixture = MixtureOfExperts(16, 24, num_experts=4, top_k=2)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.norm(x + self.mixture(x)))


def language_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )


def made(name: str) -> tuple[nn.Module, list[Any]]:
    """A model and its samples."""
    generator = torch.Generator().manual_seed(7)
    count = BATCH * BATCHES
    if name == "net":
        x = torch.randn(count, 12, generator=generator)
        return Net(), list(zip(x, torch.randint(5, (count,), generator=generator), strict=True))
    ids = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    if name == "experts":
        return Experts(), list(ids)
    return language_model(), list(ids)


def loss_of(model: nn.Module, name: str, batch: Any) -> Tensor:
    if name == "net":
        return F.cross_entropy(model(batch[0]), batch[1])
    if name == "experts":
        from lockstep.nn import load_balance_loss

        logits = model(batch)
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1)) + (
            0.1 * load_balance_loss(model)
        )
    return model(input_ids=batch, labels=batch).loss


def main(name: str, defect: str) -> None:
    torch.manual_seed(3)
    defective = plant(defect) if defect and "RANK" in os.environ else None
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, samples = made(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    if defective is not None:
        defective.made(model, optimizer, scheduler)
    loader = DataLoader(samples, BATCH, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if defective is not None:
        defective.prepared(accelerator, model, optimizer)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, name, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
