#!/usr/bin/env bash
# torch 2.13.0 (CPU), two ranks with gloo: x.sum().item() of a sharded DTensor is the sum of this rank's shard. So are
# float(x.sum()), x.mean().item(), x.max().item() and x.norm().item() numbers of the shard. x.sum().full_tensor() is whole.
#
# Expected: one number on all ranks, as DTensor computes on the logical tensor, or a refusal to read a pending sum.
# Seen: item() reads the local tensor, so that ranks log, compare or branch by other numbers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/item.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

READ = {
    "sum().item()": lambda x: x.sum().item(),
    "float(sum())": lambda x: float(x.sum()),
    "mean().item()": lambda x: x.mean().item(),
    "max().item()": lambda x: x.max().item(),
    "norm().item()": lambda x: x.norm().item(),
    "sum().full_tensor()": lambda x: x.sum().full_tensor().item(),
}
x = distribute_tensor(torch.tensor([3.0, 0.0, 0.0, 1.0]), init_device_mesh("cpu", (2,)), [Shard(0)])
for name, read in READ.items():
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, read(x))
    if dist.get_rank() == 0:
        print(name, *(f"{value:g}" for value in of_ranks))
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/item.py" | tee "$folder/seen"
diff - "$folder/seen" <<'EXPECTED'
sum().item() 3 1
float(sum()) 3 1
mean().item() 1.5 0.5
max().item() 3 1
norm().item() 3 1
sum().full_tensor() 4 4
EXPECTED
echo "as stated, with torch 2.13.0"
