"""Files beside the source say what is true: versions, paths, links, completion of the shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import yaml

import lockstep
from tests.site.pages import ROOT


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_the_version_is_the_same_everywhere() -> None:
    (project,) = re.findall(r'^version = "(.+)"$', text("pyproject.toml"), flags=re.MULTILINE)
    assert lockstep.__version__ == project == yaml.safe_load(text("CITATION.cff"))["version"]


@pytest.mark.parametrize(
    "name", sorted(path.name for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
)
def test_an_issue_template_has_what_forms_need(name: str) -> None:
    form = yaml.safe_load(text(f".github/ISSUE_TEMPLATE/{name}"))
    assert {"name", "description", "body"} <= set(form)
    ids = [item["id"] for item in form["body"]]
    assert len(ids) == len(set(ids))
    assert all(item["type"] in ("textarea", "input") and item["attributes"]["label"] for item in form["body"])


def test_what_agents_md_names_exists() -> None:
    guide = text("AGENTS.md")
    paths = re.findall(r"\]\(([^)#]+)\)", guide) + re.findall(r"(tests/[\w/.]+|docs/[\w/.]+\w)", guide)
    assert len(paths) > 6
    assert [path for path in paths if not (ROOT / path).exists()] == []
    targets = re.findall(r"`?make (\w+)", guide)
    assert [
        name for name in targets if not re.search(rf"^{name}:", text("Makefile"), flags=re.MULTILINE)
    ] == []


def test_the_dockerfile_copies_what_there_is() -> None:
    copied = [line.split()[1:-1] for line in text("Dockerfile").splitlines() if line.startswith("COPY ")]
    assert copied
    assert [name for names in copied for name in names if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("lockstep la", "launch"),
        ("lockstep launch --mixed-", "--mixed-precision"),
        ("lockstep launch --mixed-precision b", "bf16"),
    ],
)
def test_the_shell_completes(words: str, found: str) -> None:
    environment = {
        **os.environ,
        "_LOCKSTEP_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    command = [sys.executable, "-c", "from lockstep.cli import run_lockstep; run_lockstep()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [f"plain,{found}"]
