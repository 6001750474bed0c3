"""Models whose weights are mapped from a file, for tests of streaming."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from lockstep.offload.files import map_file


class Blocks(nn.Module):
    """An embedding, equal blocks and a head."""

    def __init__(self, blocks: int = 6, width: int = 128, words: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU()) for _ in range(blocks)
        )
        self.head = nn.Linear(width, words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)

    def named_blocks(self) -> dict[str, nn.Module]:
        return {f"blocks.{index}": block for index, block in enumerate(self.blocks)}


def map_weights(model: nn.Module, path: Path, writable: bool = False) -> nn.Module:
    """Have the parameters of ``model`` mapped from a new file, one after the other without gaps."""
    path.write_bytes(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    file = map_file(path, writable)
    offset = 0
    for parameter in model.parameters():
        data = file[offset : offset + parameter.nbytes]
        parameter.data = data.view(parameter.dtype).view(parameter.shape)
        offset += parameter.nbytes
    return model
