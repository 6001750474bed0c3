#!/usr/bin/env bash
# deepspeed 0.19.8 (CPU): a key that it does not know is an error in some sections of its JSON, and ignored without a word
# in others and at the top. So a misspelled "zero_optimization" trains without ZeRO, and "stage" misspelled in it raises.
# Files of projects that older versions accepted raise: "compile": {"disable": false} of axolotl, "loss_scale" in "bf16".
#
# Expected: one rule for all keys.
# Seen: sections that are pydantic models (fp16, bf16, zero_optimization, compile) refuse, those read key by key ignore.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet setuptools wheel torch==2.13.0 numpy==2.4.6
DS_BUILD_OPS=0 "$folder/venv/bin/python" -m pip install --quiet --no-build-isolation deepspeed==0.19.8
cat > "$folder/keys.py" <<'PYTHON'
from deepspeed.runtime.config import DeepSpeedConfig

CASES = {
    "top": {"zero_optimisation": {"stage": 3}},
    "activation_checkpointing": {"activation_checkpointing": {"partition_activation": True}},
    "aio": {"aio": {"queue_dept": 8}},
    "flops_profiler": {"flops_profiler": {"profile_steps": 1}},
    "zero_optimization": {"zero_optimization": {"stages": 3}},
    "compile": {"compile": {"disable": False}},
    "bf16": {"bf16": {"enabled": True, "loss_scale": 0}},
    "fp16": {"fp16": {"enabled": True, "opt_level": "O2"}},
}
for name, section in CASES.items():
    try:
        DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **section})
    except Exception as error:
        print("key", name, "raises", type(error).__name__)
    else:
        print("key", name, "ignored")
PYTHON
"$folder/venv/bin/python" "$folder/keys.py" 2> "$folder/log" | grep '^key ' | tee "$folder/seen"
diff - "$folder/seen" <<'EXPECTED'
key top ignored
key activation_checkpointing ignored
key aio ignored
key flops_profiler ignored
key zero_optimization raises ValidationError
key compile raises ValidationError
key bf16 raises ValidationError
key fp16 raises ValidationError
EXPECTED
echo "as stated, with deepspeed 0.19.8"
