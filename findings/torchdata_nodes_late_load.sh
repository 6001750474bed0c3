#!/usr/bin/env bash
# torchdata 0.11.0 (torch 2.13.0): torchdata.nodes.Loader forgets that a state was loaded if state_dict() was called on it
# before, as code does that loads in place (torch.distributed.checkpoint asks for the current state first). The next
# iteration is a whole epoch, and the loaded state holds for the one after it.
#
# Expected: after load_state_dict, the next iteration begins at the loaded state, whatever was asked before.
# Seen: state_dict() makes an iterator, which the next iter() returns as it is. The loaded state waits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 torchdata==0.11.0 numpy==2.4.6
cat > "$folder/load.py" <<'PYTHON'
import torchdata.nodes as nodes
from torch.utils.data import SequentialSampler


def loader():
    return nodes.Loader(nodes.SamplerWrapper(SequentialSampler(range(6))))


stopped = loader()
iterator = iter(stopped)
for _ in range(4):
    next(iterator)
state = stopped.state_dict()
for asks_before in (False, True):
    resumed = loader()
    if asks_before:
        resumed.state_dict()
    resumed.load_state_dict(state)
    print(f"state_dict() before: {asks_before}:", list(resumed), list(resumed))
PYTHON
"$folder/venv/bin/python" "$folder/load.py" | tee "$folder/seen"
diff - "$folder/seen" <<'EXPECTED'
state_dict() before: False: [4, 5] [0, 1, 2, 3, 4, 5]
state_dict() before: True: [0, 1, 2, 3, 4, 5] [4, 5]
EXPECTED
echo "as stated, with torchdata 0.11.0"
