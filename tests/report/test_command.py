"""``lockstep report`` as people call it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from cli.calling import call, check_refused
from tests.report.runs import CRASHED, END, Start, Synthetic, write_run

SMALL = Synthetic(starts=(Start(1, 30, ends=END),))


def test_it_prints_the_summary_and_writes_the_page_beside_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "gpt" / "run", CRASHED)
    code, out, err = call(capsys, "report", tmp_path / "gpt")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "What it did"
    assert lines[1].startswith("  620 optimizer steps")
    assert "Rank 3 failed after step 620: RuntimeError: CUDA error" in out
    assert lines[-1] == str(folder / "report.html")
    assert (folder / "report.html").read_text("utf-8").endswith("</html>\n")
    assert sorted(path.name for path in folder.iterdir()) == ["events.jsonl", "measures.jsonl", "report.html"]


def test_json_has_the_numbers_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", SMALL)
    code, out, _ = call(capsys, "report", "--json", folder)
    said = json.loads(out)
    assert code == 0
    assert list(said) == ["format", "runs"]
    assert said["format"] == "lockstep report 1"
    (run,) = said["runs"]
    assert (run["status"], run["steps"], run["samples"]) == ("finished", 30, 30 * 512)
    assert not (folder / "report.html").exists()
    call(capsys, "report", "--json", folder, "-o", tmp_path / "page.html")
    assert (tmp_path / "page.html").is_file()


def test_every_key_of_the_json_is_documented() -> None:
    from lockstep.history import ColumnReader, RunHistory
    from lockstep.report import numbers_of, to_json

    reader = ColumnReader()
    reader.add([{"step": 1}])
    keys = to_json(numbers_of(RunHistory("", Path(), reader.columns(), (), {}), 0.0))
    assert [key for key in keys if f"``{key}``" not in (to_json.__doc__ or "")] == []


def test_what_is_no_run_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(capsys, ["report", str(tmp_path)], "contains neither measures.jsonl nor events.jsonl")
    check_refused(capsys, ["report", str(tmp_path / "nothing")], "does not exist")
    folder = write_run(tmp_path / "run", SMALL)
    check_refused(capsys, ["report", str(folder), "-o", str(tmp_path)], "is a folder. Name a file")
    missing = tmp_path / "missing" / "page.html"
    check_refused(capsys, ["report", str(folder), "-o", str(missing)], "No such file or directory")
    check_refused(capsys, ["report", str(folder), "-o", "a\0b"], "Name another file with -o.")
    assert not list(tmp_path.glob("**/.*"))


def test_a_page_that_is_there_is_replaced_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", SMALL)
    page = folder / "report.html"
    page.write_text("older")
    with open(page) as reader:
        call(capsys, "report", folder)
        assert reader.read() == "older"
    assert page.read_text("utf-8").startswith("<!doctype html>")


def test_links_in_the_folder_of_somebody_else_are_not_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, victim = write_run(tmp_path / "run", SMALL), tmp_path / "victim"
    victim.write_text("precious")
    for name in ("report.html", f".report.html.{os.getpid()}", ".report.html.guessed"):
        (folder / name).symlink_to(victim)
    code, _, _ = call(capsys, "report", folder)
    assert code == 0 and (folder / "report.html").read_text("utf-8").endswith("</html>\n")
    assert not (folder / "report.html").is_symlink()
    # Even a name that is guessed is only taken if it is new.
    monkeypatch.setattr(secrets, "token_hex", lambda nbytes: "guessed")
    check_refused(capsys, ["report", str(folder)], "File exists")
    assert victim.read_text() == "precious"
    assert (folder / ".report.html.guessed").is_symlink()


def test_it_imports_no_torch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", SMALL)
    code = (
        "import sys; from lockstep.cli import run_lockstep\n"
        f"try: run_lockstep(['report', {str(folder)!r}])\n"
        "except SystemExit as end: assert not end.code\n"
        "print([name for name in ('torch', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
