#!/usr/bin/env bash
# wandb 0.31.0 (offline): a run that is killed lacks the row that was logged last with a step, however long ago.
#
# Expected: log(values, step=9) is in the file of the run some seconds later, as are the steps before.
# Seen: a row is written when another step is logged, or by finish. A script that logs once an epoch, and is killed
# in the next epoch, has lost the last one. With log(values, step=9, commit=True) the row is written.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet wandb==0.31.0
cat > "$folder/log.py" <<'PYTHON'
import os
import signal
import sys
import time

import wandb

options = {"commit": True} if sys.argv[2] == "commit" else {}
run = wandb.init(project="rows", mode="offline", dir=sys.argv[1], settings=wandb.Settings(silent=True))
for step in range(10):
    run.log({"loss": float(step)}, step=step, **options)
time.sleep(30)
os.kill(os.getpid(), signal.SIGKILL)
PYTHON
cat > "$folder/read.py" <<'PYTHON'
import json
import pathlib
import struct
import sys

from wandb.proto import wandb_internal_pb2

steps = []
(path,) = pathlib.Path(sys.argv[1]).glob("wandb/offline-run-*/*.wandb")
data, at, whole = path.read_bytes(), 7, b""
while at + 7 <= len(data):  # the log format of LevelDB
    left = 32768 - at % 32768
    if left < 7:
        at += left
        continue
    _, length, kind = struct.unpack("<IHB", data[at : at + 7])
    whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
    if kind in (1, 4):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(whole)
        whole = b""
        if record.WhichOneof("record_type") == "history":
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            steps.append(row["_step"])
print(sys.argv[2], steps)
PYTHON
for way in usual commit; do
  mkdir "$folder/$way"
  "$folder/venv/bin/python" "$folder/log.py" "$folder/$way" "$way" 2> "$folder/log" || true
  "$folder/venv/bin/python" "$folder/read.py" "$folder/$way" "$way"
done | tee "$folder/seen"
diff - "$folder/seen" <<'EXPECTED'
usual [0, 1, 2, 3, 4, 5, 6, 7, 8]
commit [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
EXPECTED
echo "as stated, with wandb 0.31.0"
