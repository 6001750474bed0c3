"""A picture of ``lockstep top`` beside a job that runs.

``python -m tests.report.top_picture OUT.svg`` trains the example GPT on 4 processes, and takes it at step 60.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from lockstep.history import read_run
from lockstep.report import NEWEST_BYTES, screen
from tests.launch.helpers import COMMAND, environment

ROOT = Path(__file__).parents[2]
STEP, LIMIT_S, WIDTH = 60, 500.0, 104
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""That rich's pictures would load from the network."""


def take(folder: Path, out: Path) -> None:
    """Once the run in ``folder`` has made so many steps."""
    end = time.monotonic() + LIMIT_S
    while not (folder / "run" / "measures.jsonl").exists() or len(read_run(folder).steps) < STEP:
        assert time.monotonic() < end, "the job does not train"
        time.sleep(0.5)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(screen(read_run(folder, NEWEST_BYTES), time.time()))
    picture = console.export_svg(title="lockstep top runs/gpt", theme=MONOKAI, unique_id="top")
    picture = FONTS.sub("", picture).replace(
        "Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace"
    )
    out.write_text(picture, encoding="utf-8")


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "gpt"
        variables = environment(OMP_NUM_THREADS="1", TMPDIR=temporary)
        arguments = [
            "--nproc",
            "4",
            "--cpu",
            "examples/gpt/train.py",
            "--out",
            str(folder),
            "--save-every",
            "25",
        ]
        with subprocess.Popen(
            [*COMMAND, *arguments], env=variables, cwd=ROOT, stderr=subprocess.DEVNULL
        ) as job:
            try:
                take(folder, out)
            finally:
                job.terminate()


if __name__ == "__main__":
    main(Path(os.path.abspath(sys.argv[1])))
