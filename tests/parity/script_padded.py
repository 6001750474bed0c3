"""Trains on global batches of rows of unequal length, each padded to its longest row."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lockstep import Accelerator


class MeanOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 1)

    def forward(self, words: Tensor) -> Tensor:
        """[rows, longest] to [rows, 1]; 0 is no word."""
        is_word = (words > 0).unsqueeze(-1)
        return self.head((self.embedding(words) * is_word).sum(1) / is_word.sum(1))


def padded(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True)


accelerator = Accelerator(cpu=True, split_batches=True)
torch.manual_seed(0)
rows = [torch.randint(1, 20, (3 + 7 * number % 11,)) for number in range(40)]
loader = DataLoader(rows, batch_size=8, shuffle=True, collate_fn=padded)
model = MeanOfWords()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for words in loader:
    accelerator.backward(model(words).square().mean())
    optimizer.step()
    optimizer.zero_grad()
