"""How long the rest of a run takes, and how long a language model would at its rate."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from cli.calling import call, check_refused
from lockstep.history import read_run
from lockstep.report import numbers_of, sentences
from tests.report.runs import BEGIN, RUNNING, write_run


def add_total(folder: Path, steps: int) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "total", "time": BEGIN, "attempt": 0, "steps": steps}) + "\n")


def lines_of(folder: Path) -> list[dict[str, dict[str, float]]]:
    return [json.loads(line) for line in (folder / "measures.jsonl").read_text().splitlines()]


def test_what_is_left_follows_from_the_steps_that_the_script_has_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", RUNNING)
    lines = lines_of(folder)
    now = lines[-1]["time"] + 1.0  # type: ignore[operator]
    assert not any("left" in sentence for sentence in sentences(numbers_of(read_run(folder), now)))
    add_total(folder, 1350)
    numbers = numbers_of(read_run(folder), now)
    usual = statistics.median(line["seconds"]["total"] for line in lines)
    assert numbers.seconds_left == pytest.approx((1350 - lines[-1]["step"]) * usual)  # type: ignore[operator]
    assert any("the last step was 350 of 1,350, with " in sentence for sentence in sentences(numbers))


def test_a_language_model_takes_six_operations_for_each_parameter_and_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", RUNNING)
    lines = lines_of(folder)
    rate = sum(line["flops"]["model"] for line in lines) / sum(line["seconds"]["total"] for line in lines)
    for said, tokens in (("7B:140B", 140e9), ("7B", 140e9), ("7B:1T", 1e12)):
        code, out, _ = call(capsys, "report", "--json", "--llm", said, folder)
        (found,) = json.loads(out)["runs"]
        assert code == 0 and found["language_model_seconds"] == pytest.approx(6 * 7e9 * tokens / rate)
    _, out, _ = call(capsys, "report", "--llm", "7B", folder)
    assert (
        "At this rate\n  A language model of 7B parameters on 140B tokens takes 5.88e21 FLOPs (6 N D)" in out
    )


def test_without_operations_it_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "start", "time": 5, "world_size": 2}\n')
    _, out, _ = call(capsys, "report", "--llm", "7B", tmp_path)
    assert "is not known" in out
    _, out, _ = call(capsys, "report", "--json", "--llm", "7B", tmp_path)
    assert json.loads(out)["runs"][0]["language_model_seconds"] is None


@pytest.mark.parametrize("said", ["", "x", "7B:", "7B:x", ":3B", "1B:2B:3B"])
def test_a_size_that_is_none_is_refused(
    said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", RUNNING)
    check_refused(capsys, ["report", "--llm", said, str(tmp_path)], "--llm")
