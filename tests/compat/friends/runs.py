"""Runs of cells, by alias and with the installed Accelerate, and what is compared of them.

Each run is one process, or two, for all of its cells: most of its time is imports.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.command import LOCKSTEP
from tests.compat.friends.compare import difference
from tests.compat.processes import start as start_python

HERE = Path(__file__).parent
SOURCE = str(HERE.parents[2] / "src")
LAUNCH = (
    *LOCKSTEP[1:],
    "launch",
    "--cpu",
    "--num-cpu-threads",
    "1",
    "--as-accelerate",
    "--nproc",
)

# Trainer repeats a loss for a whole batch; Accelerate keeps as many as there are samples, from the first ranks.
# Here each rank keeps as many as it has samples. All else is compared.
OTHER_MEANS = dict.fromkeys(
    ("split_batches", "dispatch_batches", "dispatch_and_split", "gathered_objects"),
    ("eval_loss", "test_loss"),
)
MOST = {"alone": 0.0, "ddp": 1e-6, "zero": 1e-5}


def start(
    words: str,
    out: Path,
    here: bool,
    processes: int,
    packages: str = "",
    **variables: str,
) -> subprocess.Popen[str]:
    """Run cells in so many processes: here by alias, else with Accelerate itself.

    ``packages``: a folder of packages beside those that are installed.
    """
    if processes == 1:
        program = ["-m", "lockstep.compat.accelerate"] if here else []
    else:
        other = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
        program = [*(LAUNCH if here else other), str(processes)]
    out.mkdir(parents=True, exist_ok=True)
    return start_python(
        *(*program, str(HERE / "run_cells.py"), *words.split()),
        PYTHONPATH=os.pathsep.join(filter(None, [SOURCE if here else "", packages])),
        CELLS_OUT=str(out),
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        **variables,
    )


def end(*runs: subprocess.Popen[str]) -> None:
    said = [(run.communicate(timeout=1700)[0], run.returncode) for run in runs]
    for text, code in said:
        assert code == 0, text[-6000:]


def far(words: str, here: Path, there: Path, kind: str) -> list[str]:
    """The cells that are further from Accelerate's, or from the run that they go on with, than ``MOST`` says."""
    found = []
    for word in words.split():
        name, *parallel = word.split("/")[1:]
        goes_on = name == "unconditional_resumed"
        other = there / ("unconditional" if goes_on else name)
        apart = OTHER_MEANS.get(name.removeprefix("argument_"), ()) if kind == "ddp" else ()
        numbers, weights = difference(here / "-".join([name, *parallel]), other, goes_on, apart)
        if max(numbers, weights) > MOST[kind]:
            found.append(f"{word}: numbers {numbers:.1e}, weights {weights:.1e}")
    return found
