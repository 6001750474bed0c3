"""``lockstep replay``: what it says, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from lockstep.cli import cli
from lockstep.errors import UsageError
from tests.cli.calling import check_refused
from tests.replay.replays import SCRIPT, capsule_in, replay_here, run_script

ROOT = Path(__file__).parents[2]


def replay(*words: str) -> Result:
    return CliRunner().invoke(cli, ["replay", *words])


@pytest.fixture
def capsule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.set_num_threads(1)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run_script("one by zero", str(tmp_path / "run"), str(tmp_path))
    return capsule_in(tmp_path / "run")


def test_damaged_weights_are_refused_before_the_script_runs(
    capsule: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = max(
        (path for path in (capsule / "weights").rglob("*") if path.is_file()), key=lambda f: f.stat().st_size
    )
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    check_refused(capsys, ["replay", str(capsule), str(SCRIPT)], f"{file.name} is damaged")


def test_it_names_the_module_and_compares(capsule: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    said = replay(
        "--json", str(report), str(capsule), str(SCRIPT), "one by zero", str(tmp_path / "other"), str(tmp_path)
    )  # fmt: skip
    assert said.exit_code == 0, said.output
    first, *_ = said.output.splitlines()
    assert first == (
        "blocks.2.fault (Fault) is the first to go wrong, in micro-batch 1 of rank 0, step 13: its output has 48 "
        "infinite of 48 elements."
    )
    found = json.loads(report.read_text())
    assert (found["same_bits"], found["finding"]["module"]) == (True, "blocks.2.fault")
    assert not (tmp_path / "other").exists()


def test_it_says_why_there_is_no_answer(capsule: Path, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)\n")
    said = replay(str(capsule), str(script))
    assert said.exit_code == 2
    assert f"{script} failed: exit code 3." in said.output
    script.write_text("print('no training here')\n")
    said = replay("--json", "-", str(capsule), str(script))
    assert said.exit_code == 2
    assert "The script ended before its first optimizer step." in said.output


def test_another_script_has_other_numbers(
    capsule: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = replay_here(monkeypatch, capsule, "none", str(tmp_path / "other"), str(tmp_path))
    assert verdict.finding is None
    assert not verdict.has_same_bits
    assert verdict.ordinary == 8
    with pytest.raises(UsageError, match="1 that rank 0"):
        replay_here(monkeypatch, capsule, "own steps of two", str(tmp_path / "other"), str(tmp_path))


def test_without_weights_the_checkpoint_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    arguments = ("batch nan, saved", str(tmp_path / "run"), str(tmp_path))
    run_script(*arguments)
    capsule = capsule_in(tmp_path / "run")
    assert not (capsule / "weights").exists()
    verdict = replay_here(monkeypatch, capsule, *arguments)
    assert verdict.finding is not None
    assert verdict.finding.where == "batch"
    assert verdict.notes[0].endswith("are 2 steps older.")
