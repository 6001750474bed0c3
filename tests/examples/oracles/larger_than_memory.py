"""The tokens of a Llama that is wholly in memory: prompt by prompt, each token from the whole text, without a cache."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import ModuleType

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def answers(module: ModuleType, layers: int, tokens: int) -> list[list[int]]:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1365,
        num_hidden_layers=layers,
        num_attention_heads=8,
        max_position_embeddings=128,
    )
    with tempfile.TemporaryDirectory() as folder:
        module.write_model(config, Path(folder))
        model = LlamaForCausalLM.from_pretrained(folder)
    found = []
    for prompt in torch.randint(512, (8, 6), generator=torch.Generator().manual_seed(1)):
        text = prompt.tolist()
        for _ in range(tokens):
            with torch.no_grad():
                text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        found.append(text[len(prompt) :])
    return found
