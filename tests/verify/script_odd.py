"""A script that is hard to check, or impossible, in the way that its argument says."""

import os
import sys
import time
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import nn

from lockstep import Accelerator, LocalSGD

which = sys.argv[1]


def first_of(loader: Iterable[object]) -> Iterator[tuple[int, object]]:
    """Batches with their numbers; of each epoch the first 3 alone, if they are to be left."""
    for pair in enumerate(loader):
        yield pair
        if which == "leaves" and pair[0] == 2:
            break


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
if which == "short":
    x = x[:4]
data = torch.utils.data.TensorDataset(x, torch.arange(len(x)) % 4)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
validation = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=6))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
if which == "loads":
    if not os.path.exists(sys.argv[2]):
        accelerator.save_state(sys.argv[2])
    accelerator.load_state(sys.argv[2])
if which == "two":
    Accelerator().prepare(nn.Linear(8, 4).requires_grad_(False))
if which == "alone":
    block = LocalSGD(accelerator, model, local_sgd_steps=2).__enter__()
if which == "hangs":
    time.sleep(600)
epochs = 3 if which == "leaves" else 1
for number, (rows, classes) in (pair for _ in range(epochs) for pair in first_of(loader)):
    if which == "by_hand":
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.cross_entropy(model(rows), classes))
        optimizer.step()
        optimizer.zero_grad()
    if which == "validates" and number % 3 == 2:
        model.eval()
        with torch.no_grad():
            for rows, _ in validation:
                accelerator.gather_for_metrics(model(rows))
        model.train()
    if which == "validates":
        scheduler.step()
    if which == "twice":
        accelerator.backward(nn.functional.cross_entropy(model(rows), classes))
        optimizer.step()
