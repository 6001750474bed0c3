"""The line of progress of a launch: what it says, where it stands, and when there is none."""

from __future__ import annotations

import os
import pty
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.launch import StatusRow, progress_line, wants_line
from tests.launch.helpers import COMMAND, START_LIMIT_S
from tests.launch.screen import InTerminal, Screen, set_size

ROWS, COLUMNS = 10, 90
NUMBERS = {
    "step": 1200, "loss": 2.31489, "epoch": 3, "step_seconds": 0.5, "samples_per_second": 64.0,
    "tokens_per_second": 1.2e6, "mfu": 0.412,
}  # fmt: skip
SCRIPT = """
import sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from lockstep import Accelerator

end = Path(sys.argv[1])
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
loader = DataLoader(TensorDataset(torch.ones(4000, 1)), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), loader)
sys.stdout.write("begun\\n")  # at once, as other ranks write, too
sys.stdout.flush()
for number, (batch,) in enumerate(loader):
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if accelerator.is_main_process and number % 4 == 0:
        print(f"part one of line {number}", end=", ", flush=True)
    time.sleep(0.03)
    if accelerator.is_main_process and number % 4 == 0:
        print(f"part two of line {number}", flush=True)
    stop = torch.tensor(float(end.exists() and number % 4 == 3))
    if accelerator.reduce(stop, "sum") > 0:
        break
accelerator.print("the end")
"""


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({}, "step 1,200  loss 2.315  1.2M tokens/s  MFU 41%  1 min 5 s"),
        ({"total_steps": 2000}, "step 1,200/2,000  loss 2.315  1.2M tokens/s  MFU 41%  1 min 5 s, 6 min 40 s left"),
        ({"epoch_steps_left": 20}, "step 1,200  loss 2.315  1.2M tokens/s  MFU 41%  1 min 5 s, 10 s left of epoch 3"),
        ({"total_steps": 100, "epoch_steps_left": 20},
         "step 1,200/100  loss 2.315  1.2M tokens/s  MFU 41%  1 min 5 s, 10 s left of epoch 3"),
        ({"tokens_per_second": 0, "mfu": "nan", "loss": "nan"}, "step 1,200  loss NaN  64 samples/s  1 min 5 s"),
        ({"step": "nan"}, ""),
    ],
)  # fmt: skip
def test_it_says_what_is_known(changed: dict[str, float | str], line: str) -> None:
    assert progress_line({**NUMBERS, **changed}, 65.0) == line
    assert progress_line({}, 65.0) == ""


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    main, other = pty.openpty()
    set_size(other, ROWS, COLUMNS)
    yield main, other
    os.close(main)
    os.close(other)


@pytest.mark.parametrize("before", [0, 3, ROWS + 5])
def test_what_others_print_scrolls_above_it(terminal: tuple[int, int], before: int) -> None:
    main, other = terminal
    row, screen = StatusRow(other), Screen(ROWS, COLUMNS)

    def seen() -> Screen:
        os.write(other, b"\x1b[5m")  # the last that there is to read
        text = ""
        while not text.endswith("\x1b[5m"):
            text += os.read(main, 65536).decode()
        screen.feed(text)
        return screen

    for number in range(before):
        os.write(other, b"earlier %d\n" % number)
    os.write(other, b"half a ")
    row.show("step 1" + 200 * "-")
    os.write(other, b"line\n")
    assert seen().shown()[-1] == ("step 1" + 200 * "-")[: COLUMNS - 2] + "…"
    for number in range(2 * ROWS):
        os.write(other, b"later %d\n" % number)
        row.show(f"step {number + 2}")
    assert seen().shown()[-1] == f"step {2 * ROWS + 1}"
    row.clear()
    row.clear()
    os.write(other, b"last\n")
    lines = [line for line in seen().written() if line]
    earlier = [f"earlier {number}" for number in range(before)]
    assert lines == [*earlier, "half a line", *(f"later {number}" for number in range(2 * ROWS)), "last"]
    assert screen.bottom == ROWS - 1


def test_a_terminal_that_is_too_small_or_takes_nothing_is_left_alone(terminal: tuple[int, int]) -> None:
    main, other = terminal
    os.set_blocking(main, False)
    set_size(other, 4, COLUMNS)
    StatusRow(other).show("step 1")
    set_size(other, ROWS, COLUMNS)
    termios.tcflow(other, termios.TCOOFF)  # as after Ctrl-S: a write would wait
    StatusRow(other).show("step 1")
    termios.tcflow(other, termios.TCOON)
    with pytest.raises(BlockingIOError):
        os.read(main, 1)


def test_there_is_none_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not wants_line(False, "xterm")  # pytest's output is a file
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    assert wants_line(False, "xterm")
    assert not wants_line(True, "xterm") and not wants_line(False, "dumb") and not wants_line(False, "")


@pytest.mark.parametrize("flags", [[], ["-q"]])
def test_a_job_in_a_terminal_has_its_own_output_above_the_line_if_one_is_wanted(
    flags: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--nproc", 1 if flags else 2, *flags, tmp_path / "train.py", tmp_path / "end"]
    job = InTerminal(*COMMAND, *words, size=(ROWS, COLUMNS))
    # Line 40 comes more than a second later.
    seen = ["line 40"] if flags else ["left of epoch 0", "loss", "samples/s"]
    try:
        job.read_until(lambda text: all(word in text for word in seen))
        (tmp_path / "end").touch()
        job.read_until(lambda text: "the end\r\n" in text)
        assert job.process.wait(START_LIMIT_S) == 0
        job.read_until(lambda text: True)
    finally:
        job.close()
    screen = Screen(ROWS, COLUMNS)
    screen.feed(job.text)
    first, *own, last = [line for line in screen.written() if line and line != "begun"]
    assert last == "the end" and screen.bottom == ROWS - 1
    assert [first, *own] == [
        f"part one of line {4 * i}, part two of line {4 * i}" for i in range(1 + len(own))
    ]
    assert not flags or ("\x1b[1;" not in job.text and "loss" not in job.text)
