"""Rounds of torchrun that meet in one store, as with a port that is given: none finds what those before have left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.launch.helpers import START_LIMIT_S, environment
from tests.launch.test_elastic import free_port

SCRIPT = """
import os
import torch
from lockstep import Accelerator
accelerator = Accelerator(cpu=True)
round, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), accelerator.process_index
assert accelerator.reduce(torch.tensor(rank + 1.0), "sum") == 3
open(f"round-{round}-{rank}", "w").close()
if round < 1 and rank == 0:
    os._exit(1)
accelerator.wait_for_everyone()
"""


def test_a_fixed_port_serves_one_round_after_another(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--master-port", str(free_port()), str(script)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Rank 1 of a round may be ended before it has written.
    expected = {"round-0-0", "round-1-0", "round-1-1"}
    assert expected <= {path.name for path in tmp_path.iterdir()}
