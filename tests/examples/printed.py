"""What examples print, recorded for their pages: ``python -m tests.examples.printed`` runs each command anew.

A file of ``docs/data/printed`` is the command of a real run, after ``$``, and the lines that it printed. The tests that
run an example compare what it prints there with its file.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.site.pages import DOCS, ROOT
from tests.test_readme import ENVIRONMENT

FOLDER = DOCS / "data" / "printed"
FOLDERS = "runs/"
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?(?![\w.]*\w)")
SAMPLE = re.compile(r"^(--- a sample.*?)\n.*?^---$", re.MULTILINE | re.DOTALL)
VARIES = re.compile(rf"^[^\n]*(?: s\b|/s\b|peak)[^\n]*$|{SAMPLE.pattern}", SAMPLE.flags)
"""Times, memory, and texts of a model that has learnt little: they differ from machine to machine."""


def file_of(script: str) -> Path:
    """Of an example, as its path below ``examples`` names it."""
    return FOLDER / f"{script.removesuffix('.py')}.txt"


def recorded(script: str) -> tuple[list[str], str]:
    """The arguments of the recorded run, and what it printed."""
    command, _, text = file_of(script).read_text(encoding="utf-8").partition("\n")
    words = shlex.split(command)
    return words[words.index(f"examples/{script}") + 1 :], text


def is_recorded(script: str, words: list[str]) -> bool:
    """Whether the file is of a run with these arguments; a folder may be another one."""
    there = recorded(script)[0]
    pairs = zip(there, words, strict=False)
    return len(there) == len(words) and all(one == two or one.startswith(FOLDERS) for one, two in pairs)


def assert_as_recorded(script: str, words: list[str], text: str) -> None:
    """Compares what a test's run printed with the file; folders of the run stand for those of the command.

    Not the numbers: those of a model that learns depend on the processor, and are compared with plain torch elsewhere.
    """
    there, expected = recorded(script)
    assert is_recorded(script, words), f"record the command of this run: {words}"
    for one, two in zip(there, words, strict=True):
        text = text.replace(two, one) if one.startswith(FOLDERS) else text
    assert lines_of(text) == lines_of(expected), f"run python -m tests.examples.printed {script}"


def lines_of(text: str) -> list[str]:
    """The lines with ``N`` for each number, without those that vary."""
    return [
        " ".join(line.split()) for line in NUMBER.sub("N", VARIES.sub("", text)).splitlines() if line.strip()
    ]


def record(path: Path) -> None:
    """Runs the command of a file in an empty folder, and writes what it prints."""
    line = path.read_text(encoding="utf-8").partition("\n")[0]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        (Path(folder) / FOLDERS).mkdir()
        (Path(folder) / FOLDERS / "prompts.txt").write_text("\n".join(f"prompt {n}" for n in range(14)))
        done = subprocess.run(
            shlex.split(line.removeprefix("$ ")), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True
        )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    text = SAMPLE.sub(r"\1\n[...]\n---", done.stdout.rstrip())
    path.write_text(f"{line}\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    for path in map(file_of, sys.argv[1:]) if sys.argv[1:] else sorted(FOLDER.rglob("*.txt")):
        record(path)
