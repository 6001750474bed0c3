"""Trains with weights and no ``accumulate``, on slices of global batches, as a script of ours."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep import Accelerator

accelerator = Accelerator(cpu=True, split_batches=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.randn(34, 6), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for rows in loader:
    losses = model(rows).squeeze(1) ** 2
    is_sample = accelerator.sample_weights()
    assert is_sample.shape == losses.shape
    accelerator.backward(losses, weight=is_sample * (rows[:, 0] > 0))
    optimizer.step()
    optimizer.zero_grad()
