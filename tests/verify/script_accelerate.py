"""A script on Hugging Face Accelerate."""

import sys

import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1 if "one_cycle" in sys.argv else 2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randint(0, 4, (96,)))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=24)
if "one_cycle" in sys.argv:  # which ends in the second step of two processes
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=3)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for x, y in loader:
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
