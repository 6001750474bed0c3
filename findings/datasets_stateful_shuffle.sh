#!/usr/bin/env bash
# datasets 5.2.0 with torchdata 0.11.0 (torch 2.13.0): torchdata's StatefulDataLoader over a stream with a shuffle
# buffer. A state that is taken in the middle of an epoch loses the samples of the buffer without workers. With two
# workers it cannot be loaded at all, unless the stream has a single shard. Without a shuffle buffer all is exact.
#
# Expected: a state either gives each sample once, or says when it is taken that it cannot.
# Seen: 4 of 40 samples are lost (buffer of 8). With two workers, the state of a worker's shards is compared with a
# list of another length: IndexError when the state is loaded.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export HF_HUB_OFFLINE=1 HF_HOME="$folder/cache"
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 datasets==5.2.0 torchdata==0.11.0 numpy==2.4.6
cat > "$folder/resume.py" <<'PYTHON'
import datasets
from torchdata.stateful_dataloader import StatefulDataLoader

ROWS = 40
table = datasets.Dataset.from_dict({"i": list(range(ROWS))})


def loader(shards, shuffled, workers):
    stream = table.to_iterable_dataset(num_shards=shards)
    stream = stream.shuffle(seed=1, buffer_size=8) if shuffled else stream
    return StatefulDataLoader(stream, batch_size=2, num_workers=workers)


if __name__ == "__main__":
    for shuffled in (False, True):
        for shards in (1, 4):
            for workers in (0, 2):
                first, seen = loader(shards, shuffled, workers), []
                for number, batch in enumerate(first):
                    seen += batch["i"].tolist()
                    if number == 4:
                        state = first.state_dict()
                        break
                second = loader(shards, shuffled, workers)
                second.load_state_dict(state)
                try:
                    seen += [row for batch in second for row in batch["i"].tolist()]
                    result = f"{ROWS - len(set(seen))} lost, {len(seen) - len(set(seen))} twice"
                except IndexError:
                    result = "IndexError"
                print(f"shuffled={shuffled} shards={shards} workers={workers}: {result}")
PYTHON
"$folder/venv/bin/python" "$folder/resume.py" 2> "$folder/errors" | tee "$folder/seen"
diff - "$folder/seen" <<'EXPECTED'
shuffled=False shards=1 workers=0: 0 lost, 0 twice
shuffled=False shards=1 workers=2: 0 lost, 0 twice
shuffled=False shards=4 workers=0: 0 lost, 0 twice
shuffled=False shards=4 workers=2: 0 lost, 0 twice
shuffled=True shards=1 workers=0: 4 lost, 0 twice
shuffled=True shards=1 workers=2: 4 lost, 0 twice
shuffled=True shards=4 workers=0: 4 lost, 0 twice
shuffled=True shards=4 workers=2: IndexError
EXPECTED
echo "as stated, with datasets 5.2.0 and torchdata 0.11.0"
