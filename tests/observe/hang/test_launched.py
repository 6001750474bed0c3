"""A hang under ``lockstep launch``: named in time, ended in time."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

from lockstep.history import EVENTS, read_lines
from tests.launch import helpers as launch

SCRIPT = Path(__file__).parent / "training.py"


def line_of(text: str) -> int:
    lines = SCRIPT.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_a_rank_that_sleeps_is_named_with_its_line_and_then_the_run_is_ended(tmp_path: Path) -> None:
    script = [SCRIPT, tmp_path, "--steps", "20", "--pause", "0.02", "--hang", "1:6"]
    process = launch.start("--nproc", 2, "--cpu", "--hang-timeout", 6, *script, OMP_NUM_THREADS="1")
    ledger = tmp_path / "rank-1.txt"
    hung_at: list[float] = []

    def look() -> None:
        while not (ledger.exists() and len(ledger.read_text().splitlines()) >= 6) and process.poll() is None:
            time.sleep(0.02)
        hung_at.append(time.monotonic())

    threading.Thread(target=look).start()
    assert process.stderr is not None
    named_at, lines = None, []
    for line in process.stderr:
        lines.append(line)
        if "slow_fetch" in line and named_at is None:
            named_at = time.monotonic()
    text = "".join(lines)
    assert process.wait(60) == 124, text
    assert named_at is not None, text
    assert named_at - hung_at[0] <= 5.0
    sentence = next(line for line in lines if "slow_fetch" in line)
    assert re.search(r"rank 1 never joined all_?reduce #\d+", sentence)
    assert "that rank 0 entered at" in sentence
    assert f"training.py:{line_of('accelerator.backward(')}" in sentence
    assert f"rank 1 is at {os.path.relpath(SCRIPT)}:{line_of('time.sleep(60)')} in slow_fetch" in sentence
    assert sum("slow_fetch" in line for line in lines) <= 2  # when it is named, and when it is ended
    events = list(read_lines(tmp_path / "run" / EVENTS))
    (written,) = [event for event in events if event["event"] == "hang"]
    assert written["rank"] == 1 and written["sentence"] in sentence
    assert written["step"] == 6
