"""The README's commands and code run, and its five-line change is that of the two example scripts."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.runs import CRASHED, write_run
from tests.warm_interpreter import WarmInterpreter

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # two processes also where there is one GPU
    "LOCKSTEP_CONFIG_FILE": "",
    "XDG_CONFIG_HOME": "/nonexistent",  # not the settings of whoever runs the tests
}


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCKS if kind == language]


def commands() -> list[str]:
    """The lines of all bash blocks, continued ones joined, without comments."""
    lines = "".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [" ".join(shlex.split(line, comments=True)) for line in lines if line.strip()]


MAKE = [command for command in commands() if command.startswith("make ")]
PIP = [command for command in commands() if command.startswith("pip ")]
REPORT = [command for command in commands() if command.startswith("lockstep report ")]
RUN = [command for command in commands() if command not in MAKE + PIP + REPORT]


def run(command: list[str], folder: Path) -> str:
    """What the command prints; with its complaints, if it fails."""
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_readme_begins_with_the_two_commands() -> None:
    assert MAKE == ["make demo", "make test"]
    assert README.index("make demo") < README.index("\n## ")


@pytest.mark.parametrize("command", MAKE)
def test_a_make_command_is_a_target(command: str) -> None:
    run([*command.split(), "--dry-run"], ROOT)


def test_the_installation_names_files_that_exist() -> None:
    (command,) = PIP
    words = command.split()
    assert words[:2] == ["pip", "install"]
    assert (ROOT / words[words.index("--constraint") + 1]).is_file()


def test_the_digits_commands_print_the_same_result(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    others = ("--dry-run", "lockstep check")
    shown = {
        run(command.split(), tmp_path) for command in RUN if not any(other in command for other in others)
    }
    assert len(shown) == 1
    assert "accuracy" in shown.pop()


def test_the_report_of_a_run_says_how_it_ended(tmp_path: Path) -> None:
    (command,) = REPORT
    project = tmp_path / command.split()[-1]
    write_run(project / "run", CRASHED)
    text = run(command.split(), tmp_path)
    assert "How it ended\n  Rank 3 failed after step 620: RuntimeError" in text
    assert (project / "run" / "report.html").is_file()


def test_the_check_says_what_the_readme_shows(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (command,) = (command for command in RUN if command.startswith("lockstep check"))
    (shown,) = (text for text in blocks("text") if "match one process" in text)
    assert run(command.split(), tmp_path).split(" agree")[0] == shown.split(" agree")[0]
    picture = (ROOT / "docs/images/terminal.svg").read_text(encoding="utf-8").replace("&#160;", " ")
    assert shown.strip() in picture  # one answer of one command
    assert "`pip install lockstep` installs another project" in README


@pytest.mark.parametrize("command", [command for command in RUN if "--dry-run" in command])
def test_a_dry_run_shows_the_processes_and_where_they_meet(command: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    text = run(command.split(), tmp_path)
    words = command.split()
    assert text.startswith(f"{words[words.index('--nproc') + 1]} processes on this machine")
    assert ("10.0.0.1" in text) == ("10.0.0.1" in command)


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: re.findall(r"\w+", code)[-1])
def test_a_python_block_runs(warm_interpreter: WarmInterpreter, code: str, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(code)
    exit_code, output = warm_interpreter.run(tmp_path / "block.py")
    assert exit_code == 0, output


def test_the_five_lines_are_the_difference_of_the_two_scripts() -> None:
    (shown,) = blocks("diff")
    plain, accelerated = (
        code_lines(ROOT / "examples/digits" / name) for name in ("plain.py", "accelerated.py")
    )
    changes = [line[0] + line[2:] for line in difflib.ndiff(plain, accelerated) if line[0] in "+-"]
    assert [line for line in shown.splitlines() if line[0] in "+-"] == changes


def code_lines(path: Path) -> list[str]:
    """The file's lines from its first import on."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith("import ")) :]
