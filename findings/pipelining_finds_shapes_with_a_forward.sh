#!/usr/bin/env bash
# torch 2.13.0 (CPU), two ranks with gloo: a PipelineStage that is given no shapes finds them in its first step with one
# more forward, which changes the module's buffers. A counter of forwards is 5 after 4 micro-batches, and running
# averages of batch normalisation have one update more. torch 2.14.1 and 2.15.0 restore the buffers (4).
#
# Expected: buffers as after the forwards of the micro-batches, as without a pipeline.
# Seen: one update more, in the first step alone, and only where shapes are found and not given as input_args.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/buffers.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank = dist.get_rank()
norm = nn.BatchNorm1d(4)
stage = PipelineStage(norm, rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
counts = []
for _ in range(2):
    schedule.step(*([batch] if rank == 0 else []), target=batch)
    counts.append(int(norm.num_batches_tracked))
if rank == 0:
    print("micro-batches that batch normalisation counted after steps of 4:", *counts)
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/buffers.py" | tee "$folder/seen"
diff - "$folder/seen" <<'EXPECTED'
micro-batches that batch normalisation counted after steps of 4: 5 9
EXPECTED
echo "as stated, with torch 2.13.0"
