"""Lines outlive the process that wrote them, and never fail a run."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.history import EVENTS, MEASURES, read_lines
from lockstep.observe.measures import Journal, RunFolder, text_of


def test_lines_come_out_as_they_went_in(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run")
    lines = [{"step": i, "seconds": {"total": i / 3}, "name": "ä\n"} for i in range(100)]
    for line in lines:
        journal.append("a.jsonl", line)
    journal.close()
    journal.append("a.jsonl", {"step": 100})
    found = list(read_lines(tmp_path / "run" / "a.jsonl"))
    assert [line["step"] for line in found] == list(range(100))
    assert found[50]["seconds"]["total"] == pytest.approx(50 / 3, rel=1e-6)
    assert found[0]["name"] == "ä\n"


def test_small_numbers_keep_their_digits() -> None:
    assert json.loads(text_of({"rate": 1.23456789e-9, "time": 1.7e9 + 0.123456789})) == {
        "rate": 1.23457e-09,
        "time": 1700000000.123457,
    }


def test_a_torn_line_is_skipped_and_the_next_writer_begins_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2}\n{"st')
    journal = Journal(tmp_path)
    journal.append("a.jsonl", {"step": 3})
    journal.close()
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]
    assert list(read_lines(tmp_path / "none.jsonl")) == []


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").write_text("a file")
    journal = Journal(tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            journal.append("a.jsonl", {"step": 1})
            journal.flush()
    journal.close()
    assert len([record for record in caplog.records if str(tmp_path / "run") in record.getMessage()]) == 1


def test_a_run_that_begins_anew_moves_the_last_one_aside(tmp_path: Path) -> None:
    path = tmp_path / "run"

    def attempt(continues: bool, steps: int) -> int:
        folder = RunFolder(path)
        folder.event("checkpoint", path="before anything is settled")
        folder.begin(continues)
        folder.event("start")
        for number in range(steps):
            folder.step({"step": number})
        folder.close()
        return folder.attempt

    assert [attempt(False, 0), attempt(False, 2)] == [0, 1]  # nothing was trained by the first
    assert attempt(True, 3) == 2
    assert attempt(False, 1) == 0
    assert attempt(False, 1) == 0
    lines = [line["attempt"] for line in read_lines(tmp_path / "run.1" / MEASURES)]
    assert lines == [1, 1, 2, 2, 2]
    events = [(line["event"], line["attempt"]) for line in read_lines(path / EVENTS)]
    assert events == [("checkpoint", 0), ("start", 0)]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run", "run.1", "run.2"]


SCRIPT = """
import sys, time, torch
from lockstep import Accelerator

accelerator = Accelerator(run_dir=sys.argv[1], watch=False)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = accelerator.prepare(torch.utils.data.DataLoader(torch.randn(100000, 4), batch_size=2))
for number, batch in enumerate(loader):
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if sys.argv[2] == "raise" and number == 5:
        raise ValueError("of the script's own.")
"""


def test_a_killed_run_can_be_read(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path / "run"), ""])
    try:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and len(list(read_lines(tmp_path / "run" / MEASURES))) < 20:
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    lines = list(read_lines(tmp_path / "run" / MEASURES))
    assert len(lines) >= 20
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert all(line["samples"] == 2 for line in lines)
    start, *others = read_lines(tmp_path / "run" / EVENTS)
    assert {line["event"] for line in others} <= {"memory"}
    assert (start["event"], start["world_size"], start["parameters"]) == ("start", 1, 5)


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), "raise"]
    secret = {"LOCKSTEP_SECRET": "ab" * 32, "NCCL_DEBUG": "INFO"}
    subprocess.run(arguments, capture_output=True, timeout=250, env={**os.environ, **secret})
    events = [line for line in read_lines(tmp_path / "run" / EVENTS) if line["event"] != "memory"]
    assert [line["event"] for line in events] == ["start", "error", "end"]
    assert events[1]["sentence"] == "ValueError: of the script's own"
    assert events[1]["step"] == 6
    assert {"name": "run_dir", "value": str(tmp_path / "run"), "source": "code"} in events[0]["configuration"]
    assert events[0]["environment"]["NCCL_DEBUG"] == "INFO"
    assert "LOCKSTEP_SECRET" not in events[0]["environment"]
    assert [line["step"] for line in read_lines(tmp_path / "run" / MEASURES)] == [1, 2, 3, 4, 5, 6]
