"""A script that is hard to check, or impossible, in the way that its argument says."""

import sys
import time

import numpy as np
import torch
from torch import nn

from lockstep import Accelerator, LocalSGD

which = sys.argv[1]
accelerator = Accelerator(gradient_accumulation_steps=2 if which in ("told", "by_hand") else 1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
ranks = accelerator.num_processes
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * ranks if which == "told" else 0.1)
if which == "no_step":
    sys.exit(0)
if which == "raises":
    raise ValueError("there is no data")
generator = np.random.default_rng() if which == "unseeded" else np.random.default_rng(0)
x = torch.tensor(generator.normal(size=(48, 8)), dtype=torch.float32)
if which == "time":
    x = x + time.time() % 1
if which == "short":
    x = x[:4]
data = torch.utils.data.TensorDataset(x, torch.arange(len(x)) % 4)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if which == "saves":
    accelerator.save_state(sys.argv[2])
    sys.exit(0)
if which == "loads":
    accelerator.load_state(sys.argv[2])
if which == "two":
    Accelerator().prepare(nn.Linear(8, 4).requires_grad_(False))
if which == "alone":
    block = LocalSGD(accelerator, model, local_sgd_steps=2).__enter__()
if which == "hangs":
    time.sleep(600)
for number, (rows, classes) in enumerate(loader):
    if which == "by_hand":
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.cross_entropy(model(rows), classes))
        optimizer.step()
        optimizer.zero_grad()
    if which == "twice":
        accelerator.backward(nn.functional.cross_entropy(model(rows), classes))
        optimizer.step()
