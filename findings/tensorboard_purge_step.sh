#!/usr/bin/env bash
# tensorboard 2.21.0, torch 2.13.0 (CPU): three readers of tensorboard give three answers for a run that was resumed, which
# logs steps 0 to 9 and then, in a second writer, steps 5 and 6 again.
#
# Expected: with SummaryWriter(purge_step=5) each reader drops the old steps from 5 on. Without it, each keeps them.
# Seen: the data server (--load_fast=true) drops them in both cases. The server of --load_fast=false keeps them in both.
# EventAccumulator, which scripts use, does what is expected.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6 tensorboard==2.21.0 tensorboard-data-server==0.7.2 'setuptools<81'
cat > "$folder/purge.py" <<'PYTHON'
import contextlib
import json
import logging
import socket
import subprocess
import sys
import time
import urllib.request

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

logging.disable()
folder = sys.argv[1]
WAYS = {"plain": None, "purge": 5}
for way, purge_step in WAYS.items():
    for steps, purge, shift in ((range(10), None, 0.0), ((5, 6), purge_step, 0.5)):
        with SummaryWriter(f"{folder}/{way}", purge_step=purge) as writer:
            for step in steps:
                writer.add_scalar("loss", step + shift, step)
        time.sleep(2)  # files are read in the order of their names, which begin with the second


def served(way):
    url = f"http://127.0.0.1:{port}/data/plugin/scalars/scalars?run={way}&tag=loss"
    with contextlib.suppress(OSError):
        return [(point[1], point[2]) for point in json.load(urllib.request.urlopen(url))]
    return []


for fast in ("true", "false"):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--port", str(port), "--load_fast", fast]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while any((6, 6.5) not in served(way) for way in WAYS):
        time.sleep(1)
    for way in WAYS:
        print(f"load_fast={fast}", way, [step for step, _ in served(way)])
    server.terminate()
    server.wait()
for way in WAYS:
    board = EventAccumulator(f"{folder}/{way}")
    board.Reload()
    print("EventAccumulator", way, [event.step for event in board.Scalars("loss")])
PYTHON
timeout 300 "$folder/venv/bin/python" "$folder/purge.py" "$folder/logs" 2> "$folder/log" | tee "$folder/seen"
diff - "$folder/seen" <<'EXPECTED'
load_fast=true plain [0, 1, 2, 3, 4, 5, 6]
load_fast=true purge [0, 1, 2, 3, 4, 5, 6]
load_fast=false plain [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 5, 6]
load_fast=false purge [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 5, 6]
EventAccumulator plain [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 5, 6]
EventAccumulator purge [0, 1, 2, 3, 4, 5, 6]
EXPECTED
echo "as stated, with tensorboard 2.21.0"
