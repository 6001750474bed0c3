"""``lockstep top``: a run on one screen, once and as it goes on."""

from __future__ import annotations

import io
import json
import math
import signal
from pathlib import Path

import pytest
from rich.console import Console

from cli.calling import call, check_refused
from lockstep.history import MEASURES, read_run
from lockstep.report import NEWEST_BYTES, bar, screen, sparkline
from tests.command import LOCKSTEP
from tests.launch.screen import InTerminal
from tests.report.runs import BEGIN, CRASHED, RUNNING, RUNS, write_run


def text_of(folder: Path, now: float, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(screen(read_run(folder, NEWEST_BYTES), now))
    return console.file.getvalue()  # type: ignore[attr-defined]


def last_line(folder: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((folder / MEASURES).read_text("utf-8").splitlines()[-1])
    return found


def test_a_running_run_shows_its_newest_values_and_marks_the_slow_rank(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "gpt" / "run", RUNNING)
    last = last_line(folder)
    lines = text_of(folder, last["time"] + 1).splitlines()
    assert lines[0].startswith("gpt  running  8 ranks  zero=2")
    shown = {line.split("  ")[0].strip(): line for line in lines}
    assert shown["step"].split()[1] == "350,"
    assert float(shown["loss"].split()[1]) == pytest.approx(last["loss"], rel=1e-3)
    slow = [line for line in lines if "slow: " in line]
    assert len(slow) == 1 and "rank 5" in slow[0]
    assert float(slow[0].split("slow: ")[1].split()[0]) == pytest.approx(1.4, abs=0.05)


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("width", [40, 120])
def test_every_kind_of_run_is_shown_without_control_characters(kind: str, width: int, tmp_path: Path) -> None:
    text = text_of(write_run(tmp_path / "run", RUNS[kind]), BEGIN + 1e6, width)
    assert all(character.isprintable() or character == "\n" for character in text)
    assert max(map(len, text.splitlines())) <= width


def test_only_the_newest_steps_of_a_long_run_are_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", RUNS["long"])
    whole, newest = read_run(folder), read_run(folder, NEWEST_BYTES)
    assert (folder / MEASURES).stat().st_size > 2 * NEWEST_BYTES
    assert 100 < len(newest.steps) < len(whole.steps) / 2
    assert newest.steps.step[-1] == whole.steps.step[-1]
    assert newest.events == whole.events


def test_sparks_and_bars() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, math.nan, 3.0]) == "▁ █"
    assert sparkline([2.0, 2.0]) == "▁▁" and sparkline([]) == ""
    assert sparkline(range(100), width=2) == "▁█"
    assert (bar(0.5, 10), bar(2.0, 10), bar(-1.0, 10), bar(math.nan, 10)) == ("█" * 5, "█" * 10, "", "")


def test_without_a_terminal_it_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "gpt" / "run", CRASHED)
    code, out, err = call(capsys, "top", tmp_path / "gpt")
    assert (code, err) == (0, "")
    assert out.startswith("gpt  failed")


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(capsys, ["top", str(tmp_path)], "Give the folder of a run")


def test_in_a_terminal_it_follows_the_run_until_it_is_interrupted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", RUNNING)
    last = last_line(folder)
    top = InTerminal(*LOCKSTEP, "top", "--every", "0.1", folder, size=(40, 120))
    try:
        top.read_until(lambda text: "350, epoch" in text)
        with open(folder / MEASURES, "a") as file:
            file.write(json.dumps({**last, "step": 777}) + "\n")
        top.read_until(lambda text: "777, epoch" in text)
        seen = len(top.text)
        top.process.send_signal(signal.SIGINT)
        # A terminal that nobody reads holds up who writes.
        top.read_until(lambda text: top.process.poll() == 0)
        top.read_until(lambda text: "777, epoch" in text[seen:])  # what was seen last stays
    finally:
        top.close()
