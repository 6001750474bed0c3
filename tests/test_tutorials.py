"""Tutorials are followed to the letter: files are written, commands run in order, and print what is shown.

On a page, ``<!-- file: NAME -->`` stands before a file's text, ``<!-- runs in order -->`` before commands, and
``<!-- prints -->`` before lines, with each of which a line of every one of these commands' outputs must begin.
Pages with the same files, commands and lines, such as a page and its translation, are followed once.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.test_docs import TEXTS
from tests.test_readme import ENVIRONMENT
from tests.warm_interpreter import WarmInterpreter

PART = re.compile(
    r"^<!-- (?:file: (?P<file>[\w./]+)|(?P<kind>runs in order|prints)) -->\n```\w+\n(?P<text>.*?)^```$",
    flags=re.MULTILINE | re.DOTALL,
)
PAGES = [name for name, text in TEXTS.items() if "<!-- runs in order -->" in text]
SAME = {tuple(PART.findall(TEXTS[name])): name for name in reversed(PAGES)}
"""What is followed, and the first page that has it."""


@pytest.mark.timeout(600)  # a dozen launches
@pytest.mark.parametrize("name", sorted(SAME.values()))
def test_a_tutorial_works_as_it_is_written(
    warm_interpreter: WarmInterpreter, name: str, tmp_path: Path
) -> None:
    outputs: list[str] = []
    for part in PART.finditer(TEXTS[name]):
        text = part["text"]
        if part["file"]:
            (tmp_path / part["file"]).write_text(text, encoding="utf-8")
        elif part["kind"] == "runs in order":
            lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
            outputs = [run(line, tmp_path, warm_interpreter) for line in lines]
        else:
            for output in outputs:
                lines = [line.strip() for line in output.splitlines()]
                missing = [
                    shown
                    for shown in map(str.strip, text.splitlines())
                    if not any(line.startswith(shown) for line in lines)
                ]
                assert not missing, f"{missing}\n{output}"


def run(line: str, folder: Path, interpreter: WarmInterpreter) -> str:
    """What the command prints."""
    words = shlex.split(line, comments=True)
    if words[0] == "python" and words[1] != "-m":
        code, output = interpreter.run(folder / words[1], *words[2:])
        assert code == 0, f"{line}\n{output}"
        return output
    done = subprocess.run(words, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_there_are_tutorials() -> None:
    assert "tutorials/first-run.md" in PAGES
