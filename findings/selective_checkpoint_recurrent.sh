#!/usr/bin/env bash
# torch 2.13.0 (CPU): selective activation checkpointing that keeps matrix products (torch.utils.checkpoint,
# create_selective_checkpoint_contexts) trains nn.LSTM where oneDNN computes it, and raises where torch's own kernels
# do, on the same model and data. nn.GRU trains with both. nn.RNN, nn.LSTMCell and nn.RNNCell raise with both.
#
# Expected: kept results concern products only, so that a recurrent layer either trains or does not.
# Seen: torch's own LSTM and RNN write into the result of a product (bias, sigmoid, tanh), which is the kept one.
# oneDNN's LSTM is one operator, and the GRU's kernel makes new tensors.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/recurrent.py" <<'PYTHON'
import functools

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def keep_products(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def trains(module, steps):
    sequence = torch.randn(*steps, 2, 8, requires_grad=True)
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
    output = checkpoint(module, sequence, use_reentrant=False, context_fn=contexts)
    while isinstance(output, tuple):
        output = output[0]
    try:
        output.sum().backward()
    except RuntimeError as error:
        return "raises" if "has been mutated" in str(error) else str(error)
    return "trains"


kinds = {nn.LSTM: (4,), nn.GRU: (4,), nn.RNN: (4,), nn.LSTMCell: (), nn.GRUCell: (), nn.RNNCell: ()}
for kind, steps in kinds.items():
    found = []
    for with_onednn in (True, False):
        torch.backends.mkldnn.set_flags(with_onednn)
        found.append(trains(kind(8, 8), steps))
    print(kind.__name__, *found)
PYTHON
"$folder/venv/bin/python" "$folder/recurrent.py" | tee "$folder/seen"
diff - "$folder/seen" <<'EXPECTED'
LSTM trains raises
GRU trains trains
RNN raises raises
LSTMCell raises raises
GRUCell trains trains
RNNCell raises raises
EXPECTED
echo "as stated, with torch 2.13.0"
