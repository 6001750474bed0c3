"""The numbers of a run, beside plain arithmetic on its lines, and the sentences that they become."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.history import RunStatus, read_run
from lockstep.report import REASONS, RunNumbers, numbers_of, sentences
from lockstep.words import bytes_text, digits, duration, percent, plain_text, short, whole
from tests.report.runs import BEGIN, CRASHED, END, ERROR, HANG, RESTARTED, Start, Synthetic, write_run

NOW = BEGIN + 1e6
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
Made = Callable[[Synthetic], tuple[RunNumbers, list[dict[str, Any]]]]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """The numbers of such a run, and its lines."""

    def make(run: Synthetic, now: float = NOW) -> tuple[RunNumbers, list[dict[str, Any]]]:
        folder = write_run(tmp_path / "run", run)
        lines = [json.loads(line) for line in (folder / "measures.jsonl").read_text().splitlines()]
        return numbers_of(read_run(folder), now), lines

    return make


def counted(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each step as it was done last."""
    return list({line["step"]: line for line in lines}.values())


def test_sums_and_rates_are_those_of_the_lines(made: Made) -> None:
    numbers, lines = made(RESTARTED)
    last = counted(lines)
    seconds = sum(line["seconds"]["total"] for line in last)
    assert (numbers.steps, numbers.again) == (2000, len(lines) - 2000) == (2000, 250)
    assert numbers.samples == sum(line["samples"] for line in last)
    assert numbers.tokens_per_second == pytest.approx(sum(line["tokens"] for line in last) / seconds)
    ranks = {0: 16, 1: 16, 2: 8}
    capacity = sum(line["seconds"]["total"] * 989e12 * ranks[line["attempt"]] for line in last)
    assert numbers.peak_share == pytest.approx(sum(line["flops"]["model"] for line in last) / capacity)
    assert numbers.hardware_share == pytest.approx(numbers.peak_share * 4.9 / 4.2)
    assert numbers.recomputation == pytest.approx(4.9 / 4.2)
    assert numbers.world_sizes == [16, 8]
    assert numbers.step_times is not None and numbers.loss is not None
    assert sum(numbers.step_times.shares.values()) == pytest.approx(1, abs=1e-5)
    assert numbers.step_times.median == pytest.approx(np.median([line["seconds"]["total"] for line in last]))
    losses = {line["step"]: line["loss"] for line in last}
    assert numbers.loss.least == min(losses.values()) == losses[int(numbers.loss.least_step)]
    # The last loss, which `lockstep top` shows as well.
    assert numbers.loss.last == losses[2000]


def test_the_time_on_the_clock_is_divided_without_rest(made: Made) -> None:
    numbers, lines = made(RESTARTED)
    wall = numbers.goodput
    assert wall is not None
    assert wall.productive + sum(wall.lost.values()) == pytest.approx(wall.total, rel=1e-6)
    assert wall.lost["down"] == pytest.approx(45 + 1900)
    assert wall.lost["startup"] == pytest.approx(3 * 21, abs=1e-3)
    assert wall.lost["after"] == pytest.approx(30 + 30 + 1, abs=1e-3)
    again = [
        line
        for place, line in enumerate(lines)
        if line["step"] in {one["step"] for one in lines[place + 1 :]}
    ]
    assert wall.lost["repeated"] == pytest.approx(sum(line["seconds"]["total"] for line in again))
    assert wall.lost["saving"] == pytest.approx(8 * 2.5)
    assert wall.share == pytest.approx(wall.productive / wall.total)


@pytest.mark.parametrize(
    ("ends", "later", "status", "said"),
    [
        (END, 1e6, RunStatus.FINISHED, "It ended after step 40: the script ended."),
        ({"event": "stop", "reason": "SIGTERM"}, 1e6, RunStatus.STOPPED, "It was stopped after step 40: SIGTERM."),
        (ERROR, 1e6, RunStatus.FAILED, "Rank 3 failed after step 40: RuntimeError: CUDA error"),
        (HANG, 1e6, RunStatus.HANGS, "It stands still after step 40: rank 5 never joined all_reduce #412"),
        (None, 1e6, RunStatus.SILENT, "It ended without a word after step 40: the last sign of it is of 2026-09-21"),
        (None, 60.0, RunStatus.RUNNING, "It runs; the last step was 40, on 2026-09-21 14:13 UTC."),
    ],
)  # fmt: skip
def test_how_a_run_ended(
    tmp_path: Path, ends: dict[str, Any] | None, later: float, status: RunStatus, said: str
) -> None:
    run = read_run(write_run(tmp_path, Synthetic(starts=(Start(1, 40, ends=ends),))))
    numbers = numbers_of(run, run.steps.time[-1] + later)
    assert numbers.status is status
    assert sentences(numbers)[-1].startswith(said)


def test_a_run_that_the_watch_has_ended_hung(tmp_path: Path) -> None:
    hang = {**HANG, "time": BEGIN + 40, "attempt": 0}
    ended = {"event": "end", "reason": "hang"}
    run = read_run(write_run(tmp_path, Synthetic(starts=(Start(1, 40, ends=ended),), events=(hang,))))
    numbers = numbers_of(run, NOW)
    assert numbers.status is RunStatus.HUNG
    assert sentences(numbers)[-1].startswith(
        "It stood still after step 40, and was ended: rank 5 never joined"
    )


def test_a_hang_before_an_error_is_told_with_it(tmp_path: Path) -> None:
    hang = {**HANG, "time": BEGIN + 40, "attempt": 0}
    run = read_run(write_run(tmp_path, Synthetic(starts=(Start(1, 40, ends=ERROR),), events=(hang,))))
    assert "Before that it stood still: rank 5 never joined" in sentences(numbers_of(run, NOW))[-1]


def test_a_run_that_goes_on_after_a_hang_does_not_stand_still(tmp_path: Path) -> None:
    hang = {**HANG, "time": BEGIN + 22, "attempt": 0}
    run = read_run(write_run(tmp_path, Synthetic(starts=(Start(1, 40),), events=(hang,))))
    assert numbers_of(run, run.steps.time[-1] + 5).status is RunStatus.RUNNING


@pytest.mark.parametrize("part", sorted(REASONS))
def test_the_largest_part_beside_computing_is_named(tmp_path: Path, part: str) -> None:
    lines = [
        {"step": step, "seconds": {"total": 1.0, "forward": 0.2, "backward": 0.4, part: 0.4}}
        for step in range(1, 9)
    ]
    (tmp_path / "measures.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    said = sentences(numbers_of(read_run(tmp_path), NOW))
    what, advice = REASONS[part]
    assert f"Next: 40% is {what}. {advice}" in said


def test_a_slow_rank_is_named_and_equal_ones_are_not(made: Made) -> None:
    numbers, _ = made(Synthetic(slow_rank=5))
    assert numbers.slow_ranks == {5: pytest.approx(1.4, abs=1e-3)}
    assert "The others wait for rank 5 (1.4 times the usual)." in sentences(numbers)
    assert not made(Synthetic())[0].slow_ranks


def test_a_rank_is_not_slow_if_nobody_would_wait_for_it(tmp_path: Path) -> None:
    line = {"step": 1, "seconds": {"total": 3.0}, "rank_seconds": [0.2, 0.1]}
    (tmp_path / "measures.jsonl").write_text(json.dumps(line))
    assert not numbers_of(read_run(tmp_path), NOW).slow_ranks


def test_steps_that_become_slower_are_noticed_but_not_if_ranks_are_fewer(made: Made) -> None:
    start = Start(1, 400, 8, ends=END)
    assert any(
        "became slower" in said
        for said in sentences(made(Synthetic(starts=(start,), slower=5.0, save_every=1000))[0])
    )
    fewer = (Start(1, 200, 16, ends=ERROR), Start(201, 400, 8, ends=END))
    assert not any(
        "became slower" in said for said in sentences(made(Synthetic(starts=fewer, save_every=1000))[0])
    )


def test_losses_that_are_no_numbers_are_counted(made: Made) -> None:
    numbers, _ = made(Synthetic(not_finite=(17, 18, 300)))
    assert "The loss was no finite number in 3 steps, first in step 17." in sentences(numbers)


def test_more_than_the_peak_is_called_impossible(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(
        '{"event": "start", "time": 1, "world_size": 1, "peak_flops": 1e12}\n'
    )
    line = {"step": 1, "time": 2, "seconds": {"total": 1.0}, "flops": {"model": 2.5e12, "hardware": 2.5e12}}
    (tmp_path / "measures.jsonl").write_text(json.dumps(line))
    said = sentences(numbers_of(read_run(tmp_path), NOW))
    assert any("250% of the devices' peak, which cannot be" in one for one in said)


def test_the_sentences_of_a_crashed_run(made: Made) -> None:
    said = sentences(made(replace(CRASHED, data_wait=0.001))[0])
    assert said[0] == (
        "620 optimizer steps, 317k samples and 325M tokens in 3 min 58 s on 8 ranks; it ended in epoch 3 (the "
        "first is epoch 0)."
    )
    assert said[2].startswith(
        "A step takes 293 ms: 1,700 samples/s and 1.74M tokens/s, 18% of the devices' peak (MFU)."
    )
    assert said[3].startswith("Next: 7.1% is spent waiting for communication with other ranks.")
    assert said[-1] == (
        "Rank 3 failed after step 620: RuntimeError: CUDA error: uncorrectable ECC error encountered (train.py:88 in "
        "backward)."
    )


def test_words() -> None:
    assert [duration(one) for one in (0, 2e-6, 0.412, 4.25, 59.7, 61, 3600, 7500, 90_000, 86_400, -61, math.nan)] == [
        "0 s", "2 µs", "412 ms", "4.25 s", "1 min", "1 min 1 s", "1 h", "2 h 5 min", "1 d 1 h", "1 d",
        "-1 min 1 s", "?",
    ]  # fmt: skip
    assert [duration(one) for one in (3599.6, 86_399, 3570)] == ["1 h", "1 d", "59 min 30 s"]
    assert [bytes_text(one) for one in (0, 512, 1250, 1.6e9, 2.5e13)] == [
        "0 B",
        "512 B",
        "1.25 kB",
        "1.6 GB",
        "25 TB",
    ]
    assert [short(one) for one in (0, 7, 9999, 12_345, 2.5e6, 1.2e9, 0.25)] == [
        "0", "7", "9,999", "12.3k", "2.5M", "1.2B", "0.25",
    ]  # fmt: skip
    assert [digits(one) for one in (0, 2.3149, -0.5, 1250, 3e-7, 1e9, 999.9, math.nan, -math.inf)] == [
        "0", "2.31", "-0.5", "1,250", "3e-7", "1e9", "1,000", "NaN", "-infinity",
    ]  # fmt: skip
    assert [percent(one) for one in (0.4321, 0.043, 1.0, 2.5, 0.0004)] == [
        "43%",
        "4.3%",
        "100%",
        "250%",
        "0.04%",
    ]
    assert whole(1234.4) == "1,234"
    assert plain_text("a\x1b[31m\u202eb\nc", 9) == "a?[31m?b…"


def test_rates_are_over_the_steps_of_which_the_amount_is_known(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"step": step, "seconds": {"total": 0.5}, "samples": 8} for step in range(1, 11)
    ]
    for line in lines[4:]:
        line |= {
            "tokens": 100,
            "flops": {"hardware": 3e9} if line["step"] < 7 else {"hardware": 3e9, "model": 2e9},
        }
    (tmp_path / "measures.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "events.jsonl").write_text(
        '{"event": "start", "time": 1, "world_size": 2}\n{"event": "peak", "time": 2, "peak_flops": 1e10}\n'
    )
    numbers = numbers_of(read_run(tmp_path), NOW)
    assert (numbers.samples_per_second, numbers.tokens_per_second) == (16, 200)
    assert (numbers.tokens, numbers.tokens_missing) == (600, 4)
    assert numbers.peak_share == pytest.approx(2e9 / (0.5 * 2 * 1e10))
    assert numbers.hardware_share == pytest.approx(3e9 / (0.5 * 2 * 1e10))
    assert numbers.recomputation == pytest.approx(1.5)
    assert "80 samples and at least 600 tokens" in sentences(numbers)[0]
