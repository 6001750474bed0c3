#!/usr/bin/env bash
# MPICH 5.0.2 (PyPI): mpiexec -prepend-rank puts the rank before each piece that it reads from a process, not before each
# line. A line that a program writes in two pieces has the rank of the other process in its middle, or its own twice.
#
# Expected: "[1] part one, part two" on one line, as the option is described ("prepend rank to output").
# Seen: the second half stands on a line of its own, behind what the other rank wrote meanwhile, or in the same line
# behind another "[1] ". So a reader must take the text apart by the tags, and join pieces of one rank.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet mpich==5.0.2
export PATH="$folder/venv/bin:$PATH"
cat > "$folder/halves.py" <<'PYTHON'
import os
import sys
import time

# Rank 0 writes its second half first.
sys.stdout.write("part one, ")
sys.stdout.flush()
time.sleep(1.0 + int(os.environ["PMI_RANK"]))
sys.stdout.write("part two\n")
sys.stdout.flush()
PYTHON
mpiexec.hydra --version | grep -m 1 Version
mpiexec.hydra -n 2 -launcher fork -prepend-rank python3 "$folder/halves.py" > "$folder/output"
cat "$folder/output"
if [ "$(grep -c '^\[[01]\] part one, part two$' "$folder/output")" = 2 ]; then
  echo "The behaviour has changed: both lines are whole." >&2
  exit 1
fi
