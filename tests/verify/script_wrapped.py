"""A script with torch's own DDP or fully_shard, and no ``Accelerator``."""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
ranks = dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4), nn.BatchNorm1d(4))
x, y = torch.randn(96, 8), torch.randint(0, 4, (96,))
if "own_rows" in sys.argv:
    data, sampler = TensorDataset(x[dist.get_rank() :: ranks], y[dist.get_rank() :: ranks]), None
else:
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=8 // ranks if "shared_batch" in sys.argv else 4, sampler=sampler)
is_ddp = "fully_shard" not in sys.argv
shares = "own_buffers" not in sys.argv
spread = DistributedDataParallel(model, broadcast_buffers=shares) if is_ddp else fully_shard(model)
optimizer = torch.optim.AdamW(spread.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
for number, (x, y) in enumerate(loader):
    with spread.no_sync() if "no_sync" in sys.argv and number % 2 == 0 else nullcontext():
        loss = nn.functional.cross_entropy(spread(x), y) / 2
        loss.backward()
    if number % 2 == 0:
        continue
    if "doubled" in sys.argv and ranks > 1:
        model[3].weight.grad.mul_(2)
    nn.utils.clip_grad_norm_(spread.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
dist.destroy_process_group()
