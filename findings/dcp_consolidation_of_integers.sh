#!/usr/bin/env bash
# torch 2.13.0 (CPU): torch.distributed.checkpoint with HuggingFaceStorageWriter(save_distributed=True,
# enable_consolidation=True) raises at the end of the save if the model has a tensor of integers. nn.BatchNorm1d has one.
#
# Expected: whole weights in the folder, as without such a tensor: the same writer has written them all to sharded/.
# Seen: TypeError (torch.finfo of an integer dtype) after the shards are complete, and no whole file. Without
# enable_consolidation the save passes. So the shards must be joined by other means. What dcp.save raises
# (CheckpointException) is a BaseException, so a training script's "except Exception" around the save does not see it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
cat > "$folder/consolidate.py" <<'PYTHON'
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/rendezvous", rank=0, world_size=1)
for model in (nn.LayerNorm(3), nn.BatchNorm1d(3)):
    for consolidate in (False, True):
        path = Path(sys.argv[1]) / f"{type(model).__name__}-{consolidate}"
        writer = HuggingFaceStorageWriter(str(path), save_distributed=True, enable_consolidation=consolidate)
        try:
            dcp.save(model.state_dict(), storage_writer=writer)
            outcome = "saved"
        except BaseException as error:
            kind = "Exception" if isinstance(error, Exception) else "BaseException"
            outcome = f"raised a {kind}, finfo" if "finfo" in str(error) else repr(error)
        files = sorted(str(file.relative_to(path)) for file in path.rglob("*.safetensors"))
        print(type(model).__name__, consolidate, outcome, *files)
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/python" "$folder/consolidate.py" "$folder" 2> "$folder/errors" | tee "$folder/seen"
diff - "$folder/seen" <<'EXPECTED'
LayerNorm False saved shard-00001-model-00001-of-00001.safetensors
LayerNorm True saved model-00001-of-00001.safetensors sharded/shard-00001-model-00001-of-00001.safetensors
BatchNorm1d False saved shard-00001-model-00001-of-00001.safetensors
BatchNorm1d True raised a BaseException, finfo sharded/shard-00001-model-00001-of-00001.safetensors
EXPECTED
echo "as stated, with torch 2.13.0"
