"""``lockstep schedule``: what it prints and draws, and what it refuses."""

from __future__ import annotations

import json

import pytest

from cli import calling
from lockstep.config import Schedule


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return calling.call(capsys, "schedule", *arguments)


def test_one_schedule_has_its_numbers_and_a_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "1f1b", "--ranks", "4", "--micro-batches", "8")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "1F1B: 4 ranks, 8 micro-batches, bubble 27.3%"
    assert lines[2].split() == ["1f1b", "1", "27.27%", "15.79%", "33", *"4321"]
    assert lines[4].startswith("rank 0 F0 F1 F2 F3                   B0--- ")
    assert len([line for line in lines if line.startswith("rank ")]) == 4


def test_a_comparison_has_a_row_for_each_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "--compare", "--ranks", "4", "--micro-batches", "7")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines() if line.split()[:1]}
    assert set(Schedule.list()) <= set(rows)
    assert "7 micro-batches and 8 stages" in rows["dualpipev"]
    assert rows["zbv"].split()[1:3] == ["2", "6.67%"]


def test_json_has_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "zero_bubble", "--times", "1,2,0.5", "--json")
    facts = json.loads(out)
    assert (code, facts["schedule"], facts["stages_per_rank"]) == (0, "zero_bubble", 1)
    assert facts["idle"] == [7.5] * 4
    assert facts["bubble"] == 7.5 / (7.5 + 8 * 3.5)
    code, out, _ = call(capsys, "--compare", "--json", "--ranks", "3", "--micro-batches", "5")
    assert [row["schedule"] for row in json.loads(out)] == Schedule.list()


def test_a_timeline_too_long_for_text_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "gpipe", "--ranks", "2", "--micro-batches", "300")
    assert code == 0
    assert "too long for text" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "No schedule is named"),
        (["1f1b", "--compare"], "not '1f1b' alone"),
        (["--compare", "--stages-per-rank", "2"], "--stages-per-rank belongs to one schedule"),
        (["zvb"], "Did you mean 'zbv'?"),
        (["1f1b", "--micro-batches", "3"], "3 micro-batches and 4 stages"),
        (["interleaved", "--micro-batches", "9"], "Use 8 or 12"),
        (["1f1b", "--ranks", "0"], "--ranks=0"),
        (["1f1b", "--ranks", "9" * 30], "is not an integer"),
        (["gpipe", "--ranks", "100"], "at most 64 ranks"),
        (["--compare", "--ranks", "100"], "at most 64 ranks"),
        (["1f1b", "--times", "1"], "--times='1'"),
    ],
)
def test_bad_input_is_exit_code_2_and_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    calling.check_refused(capsys, ["schedule", *arguments], message)
