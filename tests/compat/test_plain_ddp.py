"""The page for people from plain DDP: its table says what each line that is left in a script comes to."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.command import LOCKSTEP
from tests.compat.processes import ALONE
from tests.site.pages import DOCS
from tests.warm_interpreter import WarmInterpreter

PAGE = (DOCS / "how-to/from-ddp.md").read_text(encoding="utf-8")
LEFT_IN = re.compile(r"<!-- left in -->\n\n(.*?)\n<!-- end of left in -->", re.DOTALL)
SCRIPT = Path(__file__).with_name("leftovers.py")


def table() -> list[list[str]]:
    """The rows: the line of plain DDP, what it is in Lockstep, what it comes to on one process, and on two."""
    (found,) = LEFT_IN.findall(PAGE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in found.splitlines()[2:]]


def outcomes(output: str) -> dict[str, list[str]]:
    (line,) = re.findall(r"^FOUND (.*)$", output, re.MULTILINE)
    found: dict[str, list[str]] = json.loads(line)
    return found


@pytest.fixture(scope="module")
def one(warm_interpreter: WarmInterpreter, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    script = shutil.copy(SCRIPT, tmp_path_factory.mktemp("leftovers"))
    code, output = warm_interpreter.run(Path(script), "ddp")
    assert code == 0, output
    return outcomes(output)


@pytest.fixture(scope="module")
def two() -> dict[str, list[str]]:
    command = [*LOCKSTEP, "launch", "--nproc", "2", "--run-dir", "no", str(SCRIPT), "ddp"]
    done = subprocess.run(command, env=ALONE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return outcomes(done.stdout)


def test_the_table_says_what_each_line_comes_to(one: dict[str, list[str]], two: dict[str, list[str]]) -> None:
    shown = {row[0].strip("`"): (row[2], row[3]) for row in table()}
    assert shown == {line: (one[line][0], two[line][0]) for line in one}, (one, two)


@pytest.mark.parametrize("line", ["DistributedSampler(data)", "DistributedDataParallel(model)"])
def test_a_refusal_names_what_to_do(two: dict[str, list[str]], line: str) -> None:
    outcome, message = two[line]
    assert outcome == "refused"
    assert "prepare()" in message
