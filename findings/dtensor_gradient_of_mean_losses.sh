#!/usr/bin/env bash
# torch 2.13.0 (CPU), two ranks with gloo: F.mse_loss of a DTensor that is sharded by rows has the right value and a
# gradient that is 2 times too large, as many times as there are ranks. So have smooth_l1_loss, huber_loss and
# soft_margin_loss; l1_loss and x.square().mean() have the right one. With 5 rows on 2 ranks the value is wrong as well.
#
# Expected: the gradient of the whole tensor, as x.square().mean() gives it, which is the same loss here.
# Seen: each rank divides by the number of its own elements, forward and backward. The average over the ranks corrects
# the forward of equal shards, and nothing corrects the backward.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/losses.py" <<'PYTHON'
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

LOSSES = {
    "square().mean()": lambda x: x.square().mean(),
    "l1_loss": lambda x: F.l1_loss(x, torch.zeros_like(x)),
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x)),
    "huber_loss": lambda x: F.huber_loss(x, torch.zeros_like(x)),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, torch.ones_like(x)),
}
mesh = init_device_mesh("cpu", (2,))
for rows in (6, 5):
    values = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))
    for name, loss_of in LOSSES.items():
        whole = values.clone().requires_grad_()
        sharded = distribute_tensor(values, mesh, [Shard(0)]).requires_grad_()
        expected, found = loss_of(whole), loss_of(sharded)
        expected.backward()
        found.backward()
        is_right = torch.allclose(found.full_tensor(), expected)
        ratio = (sharded.grad.full_tensor() / whole.grad).median()
        if dist.get_rank() == 0:
            print(rows, name, "right" if is_right else "wrong", f"gradient x{ratio:.2f}")
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/losses.py" | tee "$folder/seen"
diff - "$folder/seen" <<'EXPECTED'
6 square().mean() right gradient x1.00
6 l1_loss right gradient x1.00
6 mse_loss right gradient x2.00
6 smooth_l1_loss right gradient x2.00
6 huber_loss right gradient x2.00
6 soft_margin_loss right gradient x2.00
5 square().mean() right gradient x1.00
5 l1_loss right gradient x1.00
5 mse_loss wrong gradient x1.67
5 smooth_l1_loss wrong gradient x1.67
5 huber_loss wrong gradient x1.67
5 soft_margin_loss wrong gradient x1.67
EXPECTED
echo "as stated, with torch 2.13.0"
