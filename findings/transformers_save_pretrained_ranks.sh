#!/usr/bin/env bash
# transformers 5.24.0 (PyPI): where a process group is initialised, save_pretrained(folder) writes on rank 0 alone, also with
# is_main_process=True, its default, which the documentation says is for the process to decide. Other ranks get an empty
# folder, without an error or a warning, also if each rank saves to a folder of its own.
#
# Expected: each rank that calls save_pretrained(its_folder, is_main_process=True) finds its model there.
# Seen: rank 1's folder stays without weights; what loads from it there fails later. So a script writes on one rank and tells
# the others of its folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 transformers==5.24.0
cat > "$folder/save.py" <<'PYTHON'
import pathlib
import sys

import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group("gloo")
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
folder = pathlib.Path(sys.argv[1], f"of_rank_{dist.get_rank()}")
LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).save_pretrained(folder, is_main_process=True)
print(f"rank {dist.get_rank()}: weights {(folder / 'model.safetensors').exists()}", flush=True)
PYTHON
"$folder/venv/bin/python" -c "import torch, transformers; print('torch', torch.__version__, 'transformers', transformers.__version__)"
"$folder/venv/bin/torchrun" --nproc-per-node 2 "$folder/save.py" "$folder" 2> /dev/null | sort | tee "$folder/output"
if [ "$(grep -c 'weights True$' "$folder/output")" != 1 ]; then
  echo "The behaviour has changed: both ranks have weights." >&2
  exit 1
fi
