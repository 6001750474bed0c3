"""Python in a process of its own, where nothing says how Accelerate was started."""

from __future__ import annotations

import os
import subprocess
import sys

ALONE = {
    **{name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")},
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def start(*words: str, **variables: str) -> subprocess.Popen[str]:
    """What it prints to both streams comes by one pipe."""
    return subprocess.Popen(
        [sys.executable, *words],
        env=ALONE | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
