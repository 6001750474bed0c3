"""The terminal in the README: ``python -m tests.site.terminal`` runs its commands and draws what they print."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from tests.site.pages import DOCS, ROOT
from tests.test_readme import ENVIRONMENT

PICTURE = DOCS / "images/terminal.svg"
COMMANDS = (
    "python examples/digits/accelerated.py --epochs 1",
    "lockstep launch --nproc 2 examples/digits/accelerated.py --epochs 1",
    "lockstep launch --nproc 2 --parallel zero=3 examples/digits/accelerated.py --epochs 1",
    "lockstep check --nproc 2 --parallel zero=3 examples/digits/accelerated.py",
)
WIDTH = 100


def output_of(command: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        done = subprocess.run(
            command.split(),
            cwd=folder,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    return done.stdout.strip()


def draw() -> str:
    """The picture, whose fonts are those of the reader: it loads nothing from the network."""
    console = Console(record=True, width=WIDTH, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
    for command in COMMANDS:
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        console.print(Text(output_of(command)))
        console.print()
    picture = console.export_svg(
        title="one script, any scale, the same numbers", theme=MONOKAI, unique_id="terminal"
    )
    picture = re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    return picture.replace("Fira Code", "ui-monospace, Menlo, Consolas")


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
