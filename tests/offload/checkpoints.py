"""Small models and checkpoints of them in several forms."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from lockstep import init_empty_weights

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.norm(self.up(x))))


class Net(nn.Module):
    """Tied embeddings, buffers of both kinds, a parameter of its own."""

    def __init__(self, depth: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.full((WIDTH,), 0.25), persistent=False)
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale + self.shift
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made(depth: int = 4, seed: int = 0) -> Net:
    """A model of which all parameters and buffers have values of their own, in evaluation mode."""
    torch.manual_seed(seed)
    model = Net(depth)
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            value.copy_(torch.rand_like(value) + (0.5 if "var" in name else -0.5))
    return model.eval()


def empty(depth: int = 4) -> Net:
    """The same without values."""
    with init_empty_weights():
        return Net(depth).eval()


def held(model: nn.Module) -> dict[str, int]:
    """Which tensors the model has."""
    return {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict without the second name of a tied parameter, as checkpoints have it."""
    return {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"}


def save(tensors: dict[str, torch.Tensor], folder: Path, form: str) -> Path:
    """A checkpoint as ``safetensors``, ``sharded`` (one file a block) or ``bin``."""
    folder.mkdir(parents=True, exist_ok=True)
    if form == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif form == "safetensors":
        save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    else:
        places = {name: f"{'-'.join(name.split('.')[:2])}.safetensors" for name in tensors}
        for file in set(places.values()):
            part = {name: tensor for name, tensor in tensors.items() if places[name] == file}
            save_file(part, str(folder / file), {"format": "pt"})
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
