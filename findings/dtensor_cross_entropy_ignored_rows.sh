#!/usr/bin/env bash
# torch 2.13.0 (CPU), two ranks with gloo: F.cross_entropy of logits that are a DTensor sharded by rows is wrong where
# ranks have other numbers of rows with ignore_index. torch 2.14.1 and 2.15.0 give the right mean.
#
# Expected: the sum over the rows that count, divided by how many these are on all ranks.
# Seen: the average of the ranks' own means, without an error. Rows that do not divide evenly are refused.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/ignored.py" <<'PYTHON'
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

mesh = init_device_mesh("cpu", (2,))
logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
for ignored in (0, 1, 2):
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    labels[:ignored] = -100
    whole = F.cross_entropy(logits, labels)
    sharded = F.cross_entropy(distribute_tensor(logits, mesh, [Shard(0)]), distribute_tensor(labels, mesh, [Shard(0)]))
    of_ranks = [F.cross_entropy(part, label) for part, label in zip(logits.chunk(2), labels.chunk(2))]
    found = sharded.full_tensor()
    if dist.get_rank() == 0:
        print(
            f"{ignored} of 6 rows ignored:",
            "the mean over all rows" if torch.allclose(found, whole) else "not the mean over all rows,",
            "" if torch.allclose(found, whole) else
            "the average of the means of ranks" if torch.allclose(found, sum(of_ranks) / 2) else "something else",
        )
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/ignored.py" | sed 's/ *$//' | tee "$folder/seen"
diff - "$folder/seen" <<'EXPECTED'
0 of 6 rows ignored: the mean over all rows
1 of 6 rows ignored: not the mean over all rows, the average of the means of ranks
2 of 6 rows ignored: not the mean over all rows, the average of the means of ranks
EXPECTED
echo "as stated, with torch 2.13.0"
