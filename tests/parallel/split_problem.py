"""The oracle of models that are split: a GPT and a Llama, trained in plain torch on one process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.nn import MixtureOfExperts, load_balance_loss
from parallel.plain import Clipped as Result
from parallel.plain import train_clipped

MODEL_FILE = Path(__file__).parents[2] / "examples" / "gpt" / "model.py"

VOCABULARY, LENGTH, ROWS, STEPS = 64, 16, 8, 20


def gpt(**config: int) -> nn.Module:
    """The demo's: fused projections, the output tied to the embedding by hand."""
    name = "lockstep_example_gpt_model"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, MODEL_FILE)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    example: Any = sys.modules[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        built: nn.Module = example.GPT(example.GPTConfig(**config))
        return built


def make_gpt(layers: int = 4) -> nn.Module:
    return gpt(vocabulary=VOCABULARY, context=LENGTH, width=32, layers=layers, heads=4)


def make_llama(layers: int = 4) -> nn.Module:
    """Grouped-query attention, rotary positions, and a loss of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


class Experts(nn.Module):
    """An embedding, two blocks with mixtures of experts that drop tokens, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.mixtures = nn.ModuleList(MixtureOfExperts(16, 32, 4, capacity_factor=1.1) for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for norm, mixture in zip(self.norms, self.mixtures, strict=True):
            x = x + mixture(norm(x))
        return self.head(x)


def make_experts(layers: int = 4) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Experts()


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "gpt": make_gpt,
    "llama": make_llama,
    "experts": make_experts,
}


def make_batches(count: int, rows: int = ROWS) -> torch.Tensor:
    """Global batches: (count, rows, LENGTH) tokens."""
    return torch.randint(0, VOCABULARY, (count, rows, LENGTH), generator=torch.Generator().manual_seed(1))


def loss_of(kind: str, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The GPT's is computed outside of the model, Llama's inside."""
    if kind == "llama":
        return model(input_ids=tokens, labels=tokens).loss
    logits = model(tokens)
    if kind == "experts":
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + 0.01 * load_balance_loss(model)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def make_optimizer(model: nn.Module, name: str = "adamw") -> torch.optim.Optimizer:
    if name == "adamw":
        # Adam turns rounding into steps of size lr where a gradient is nothing but rounding: not with this eps.
        return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(
    kind: str,
    steps: int = STEPS,
    accumulation: int = 1,
    optimizer: str = "adamw",
    clip: float = 1.0,
    layers: int = 4,
) -> Result:
    torch.set_num_threads(1)
    model = MODELS[kind](layers)
    losses = (loss_of(kind, model, batch) for batch in make_batches(steps * accumulation))
    return train_clipped(model, losses, accumulation, clip, [make_optimizer(model, optimizer)])


def difference(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of any tensor that both have, norm-wise."""
    assert actual.keys() <= expected.keys() and actual
    return max(
        ((actual[name] - expected[name]).norm() / expected[name].norm().clamp_min(1e-12)).item()
        for name in actual
    )
