#!/usr/bin/env bash
# webdataset 1.0.2: WebDataset(shardshuffle=12) gives one order of the shards in all epochs of a process, with a seed
# and without one, and in the repetitions of repeat(2). detshuffle=True gives another one in each epoch. A seed does not
# make resampled=True repeatable: two equal pipelines draw other shards.
#
# Expected: a shuffle draws anew in each epoch, and a seed makes each of the orders repeatable.
# Seen: the default shuffle begins again with its seed in each epoch; resampling has no use for it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet webdataset==1.0.2 numpy==2.4.6
cat > "$folder/epochs.py" <<'PYTHON'
import sys
import warnings

import webdataset

warnings.simplefilter("ignore")
folder = sys.argv[1]
shards = [f"{folder}/{number:02d}.tar" for number in range(12)]
for number, shard in enumerate(shards):
    with webdataset.TarWriter(shard) as writer:
        writer.write({"__key__": f"{number:04d}", "txt": "text"})


def orders(pipeline):
    return [tuple(sample["__key__"] for sample in pipeline) for _ in range(3)]


for name, options in {
    "no seed": {"shardshuffle": 12},
    "seed=1": {"shardshuffle": 12, "seed": 1},
    "detshuffle, seed=1": {"shardshuffle": 12, "detshuffle": True, "seed": 1},
}.items():
    print(f"{name}: {len(set(orders(webdataset.WebDataset(shards, **options))))} orders in 3 epochs")
resampled = [orders(webdataset.WebDataset(shards, resampled=True, seed=1).with_epoch(24)) for _ in range(2)]
print(f"resampled, seed=1: repeatable: {resampled[0] == resampled[1]}")
PYTHON
"$folder/venv/bin/python" "$folder/epochs.py" "$folder" | tee "$folder/seen"
diff - "$folder/seen" <<'EXPECTED'
no seed: 1 orders in 3 epochs
seed=1: 1 orders in 3 epochs
detshuffle, seed=1: 3 orders in 3 epochs
resampled, seed=1: repeatable: False
EXPECTED
echo "as stated, with webdataset 1.0.2"
