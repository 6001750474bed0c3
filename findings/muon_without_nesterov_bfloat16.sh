#!/usr/bin/env bash
# torch 2.13.0 (CPU): torch.optim.Muon(nesterov=False) scales the momentum of bfloat16 weights to norm 1 in each step. It
# keeps that of float32 weights, and of bfloat16 weights with nesterov=True. torch 2.15.0 keeps all.
#
# Expected: momentum = momentum * 0.5 + gradient * 0.5 (momentum=0.5), whichever the type and the kind of update.
# Seen: the orthogonalization divides its argument in place. A copy is made only by a cast to bfloat16, and without
# Nesterov's term its argument is the momentum itself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/momentum.py" <<'PYTHON'
import torch
from torch import nn

for dtype in (torch.float32, torch.bfloat16):
    for nesterov in (True, False):
        weight = nn.Parameter(torch.zeros(4, 4, dtype=dtype))
        optimizer = torch.optim.Muon([weight], momentum=0.5, nesterov=nesterov)
        norms, expected = [], torch.zeros(4, 4)
        for step in range(3):
            weight.grad = torch.full((4, 4), 8.0 * 2**step, dtype=dtype)
            expected = 0.5 * expected + 0.5 * weight.grad.float()
            optimizer.step()
            found = optimizer.state[weight]["momentum_buffer"].float()
            norms.append(f"{float(found.norm()):.3g} of {float(expected.norm()):.3g}")
        print(dtype, "nesterov" if nesterov else "without", *norms, sep=", ")
PYTHON
"$folder/venv/bin/python" "$folder/momentum.py" | tee "$folder/seen"
diff - "$folder/seen" <<'EXPECTED'
torch.float32, nesterov, 16 of 16, 40 of 40, 84 of 84
torch.float32, without, 16 of 16, 40 of 40, 84 of 84
torch.bfloat16, nesterov, 16 of 16, 40 of 40, 84 of 84
torch.bfloat16, without, 1 of 16, 1 of 40, 1 of 84
EXPECTED
echo "as stated, with torch 2.13.0"
