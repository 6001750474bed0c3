#!/usr/bin/env bash
# torchdata 0.11.0 (torch 2.13.0): the state of torchdata.nodes.Loader over a SamplerWrapper says how many indices were
# given, but not in which state the generator of the sampler was. So torch's RandomSampler with a generator of its own
# resumes the first epoch exactly, and any later one in another order.
#
# Expected: the resumed epoch gives the indices that are left, as it does in the first epoch.
# Seen: in the second epoch, indices come twice and others are lost, without a word.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 torchdata==0.11.0 numpy==2.4.6
cat > "$folder/resume.py" <<'PYTHON'
import torch
import torchdata.nodes as nodes
from torch.utils.data import RandomSampler

ROWS = 12


def loader():
    generator = torch.Generator().manual_seed(1)
    return nodes.Loader(nodes.SamplerWrapper(RandomSampler(range(ROWS), generator=generator)))


for epoch in range(3):
    first, seen = loader(), []
    for _ in range(epoch):
        list(first)
    for number, row in enumerate(first):
        seen.append(row)
        if number == 4:
            state = first.state_dict()
            break
    second = loader()
    second.load_state_dict(state)
    seen += list(second)
    print(f"epoch {epoch}: every index once: {sorted(seen) == list(range(ROWS))}")
PYTHON
"$folder/venv/bin/python" "$folder/resume.py" | tee "$folder/seen"
diff - "$folder/seen" <<'EXPECTED'
epoch 0: every index once: True
epoch 1: every index once: False
epoch 2: every index once: False
EXPECTED
echo "as stated, with torchdata 0.11.0"
