"""``lockstep tune`` as people call it: its answers and exit codes, in processes that `lockstep launch` starts."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.command import LOCKSTEP

SCRIPT = Path(__file__).parent / "script.py"
PAGE = (Path(__file__).parents[2] / "docs" / "tune.md").read_text("utf-8")
COMMANDS = re.findall(r"^lockstep tune .*$", PAGE, flags=re.MULTILINE)


def tune(*arguments: object, folder: Path | None = None) -> tuple[int, str, str]:
    """Exit code, output and messages."""
    command = [*LOCKSTEP, "tune", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=270, check=False, cwd=folder)
    return done.returncode, done.stdout, done.stderr


def test_a_killed_rank_is_a_size_that_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    words = ["--batch-size", 4, "--accumulate", 2, "--fails", "kill", "--above", 4, "--rank", 0]
    code, said, errors = tune("--cpu", "--nproc", 1, "--json", path, SCRIPT, *words)
    assert code == 0, said + errors
    assert "does not fit: a rank was ended by signal 9" in said
    assert (
        "The largest micro-batch that fits with a global batch of 8 is 4 (times 2 accumulation steps)" in said
    )
    assert "  Accelerator(..., gradient_accumulation_steps=" in said
    report = json.loads(path.read_text("utf-8"))
    assert report["largest"] == {"micro_batch": 4, "accumulation": 2}
    assert {one["micro_batch"]: one["verdict"] for one in report["trials"]}[8] == "killed"
    assert all(one["micro_batch"] * one["accumulation"] == 8 for one in report["trials"])


def test_what_a_trainer_counts_is_tuned() -> None:
    pytest.importorskip("transformers")
    script = SCRIPT.with_name("script_trainer.py")
    code, said, errors = tune("--cpu", "--steps", 2, "--as-accelerate", "--json", "-", script, 2, 2)
    assert code == 0, said + errors
    report = json.loads(said)
    assert (report["global_batch"], report["script"]) == (4, {"micro_batch": 2, "accumulation": 2})
    assert {one["micro_batch"]: one["verdict"] for one in report["trials"]} == {2: "fits", 4: "fits"}
    assert report["use"][0].startswith("TrainingArguments(per_device_train_batch_size=")
    assert "is the same for all sizes" in report["remarks"][0]
    assert all(one["tokens_per_s"] for one in report["trials"])


def test_without_an_answer_the_exit_code_is_2() -> None:
    code, said, errors = tune("--cpu", "--json", "-", SCRIPT, "--is", "no_loader")
    assert code == 2
    assert "do not come from a loader of accelerator.prepare()" in errors
    assert json.loads(said)["largest"] is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("no_such.py",), "no_such.py"),
        (("--memory-limit", "much", str(SCRIPT)), "--memory-limit='much' is not a size"),
        (("--nproc", "3", "--parallel", "tp=2", str(SCRIPT)), "3 / 2 is not whole"),
        (("--keep", str(SCRIPT.parent), str(SCRIPT)), "is there already"),
    ],
)
def test_bad_input_is_a_message(arguments: tuple[str, ...], sentence: str) -> None:
    code, said, errors = tune(*arguments)
    assert (code, said) == (2, "")
    assert sentence in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page_are_understood(command: str, tmp_path: Path) -> None:
    shutil.copy(SCRIPT, tmp_path / "train.py")
    words = [word for word in shlex.split(command)[2:] if word != "--dry-run"]
    code, said, errors = tune("--dry-run", "--global-batch", 64, *words, folder=tmp_path)
    assert code == 0, said + errors
    assert "ended after 5 optimizer steps or 600 s" in said
    assert "divisors of a rank's rows of a step" in said
