"""Reading a run's folder: whole, torn, garbled, in parts."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.history import BLOCK, ColumnReader, json_lines, read_run
from lockstep.report import numbers_of, report_of, sentences, to_json
from tests.report.runs import BEGIN, END, RESTARTED, Start, Synthetic, write_run

NOW = BEGIN + 1e6
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def test_a_column_that_is_written_when_it_changes_keeps_its_value() -> None:
    reader = ColumnReader()
    reader.add([{"step": 1}, {"step": 2, "logged": {"data": 5}}, {"step": 3}])
    reader.add([{"step": 4, "logged": {"data": 7, "tensor": 1}}, {"step": 5}])
    sent = reader.columns().logged
    assert np.array_equal(sent["data"].filled_forward(5), [math.nan, 5, 5, 7, 7], equal_nan=True)
    assert np.array_equal(sent["tensor"].filled_forward(5), [math.nan] * 3 + [1, 1], equal_nan=True)


def test_steps_that_were_done_again_count_once() -> None:
    reader = ColumnReader()
    reader.add([{"step": step} for step in (1, 2, 3, 4, 3, 4, 5, 2, 3)])
    columns = reader.columns()
    kept = [int(step) for step in columns.step[columns.kept]]
    assert kept == [1, 2, 3]
    assert columns.kept.tolist() == [True] + [False] * 6 + [True] * 2


def test_time_that_no_known_part_explains_is_other() -> None:
    reader = ColumnReader()
    reader.add(
        [
            {"step": 1, "seconds": {"total": 1.0, "forward": 0.4, "thinking": 0.5, "other": 0.1}},
            {"step": 2, "seconds": {"total": 1.0, "forward": 0.9, "other": 0.1}},
            {"step": 3, "seconds": {"total": 1.0}},
        ]
    )
    other = reader.columns().parts["other"]
    assert np.array_equal(np.round(other, 9), [0.6, 0.1, math.nan], equal_nan=True)


def test_the_time_of_a_step_is_found_where_it_was_not_written() -> None:
    reader = ColumnReader()
    reader.add(
        [
            {"step": 1, "time": 10.0},
            {"step": 2, "time": 10.5, "seconds": {"forward": 0.2, "backward": 0.25}},
            {"step": 3, "time": 11.5},
            {"step": 4, "time": 20.0, "attempt": 1},
        ]
    )
    assert np.array_equal(reader.columns().total, [math.nan, 0.45, 1.0, math.nan], equal_nan=True)


GARBLED = [
    b"", b"\n\n", b"{", b'{"step": 1, "loss": 2.', b"[1, 2]\n3\nnull\n", b"\xff\xfe\x00", b'{"step": "one"}',
    b'{"step": 1e999, "time": -1e308, "seconds": {"total": "long"}}', b'{"step": ' + b"9" * 5000 + b"}",
    b'{"seconds": [], "flops": 3, "memory": "all", "bytes": null, "logged": [1], "rank_seconds": {}}',
    b'{"rank_seconds": [1, "two", null, []], "learning_rate": [], "loss": null}', b'{"learning_rate": {"a": 1}}',
    b"[" * 100_000, b'{"a":' * 50_000, b'{"step": 2, "loss": NaN, "gradient_norm": Infinity}', b'{"loss": "\xff"}',
    b'{"event": "start", "world_size": "many", "versions": [], "configuration": [3, {}], "time": "now"}',
    b'{"event": "start", "parallel": {"zero": 9}, "parameters": -3, "world_size": 0, "peak_flops": 0}',
    b'{"event": 3}', b'{"event": "spike", "skipped": 3}', b'{"event": "memory", "points": [[], [1], ["a", "b"], 3]}',
    b'{"event": "error", "attempt": 1e300, "step": {}}', b'{"event": "checkpoint", "path": "' + b"x" * 10_000 + b'"}',
    b'{"event": "start", "attempt": NaN}', b'{"event": "end", "time": 1e300}',
    b'{"event": "loaded", "path": "a\\u0000b"}',
]  # fmt: skip


@pytest.mark.parametrize("place", range(len(GARBLED)))
def test_no_line_makes_a_report_fail(tmp_path: Path, place: int) -> None:
    good = write_run(tmp_path / "good", Synthetic(starts=(Start(1, 20, ends=END),)))
    for name, files in {
        "measures": ("measures.jsonl",), "events": ("events.jsonl",), "both": ("measures.jsonl", "events.jsonl"),
    }.items():  # fmt: skip
        for before in (b"", b"good"):
            folder = tmp_path / f"{name}{before.decode()}"
            folder.mkdir()
            for file in files:
                start = (good / file).read_bytes() if before else b""
                (folder / file).write_bytes(start + GARBLED[place] + b"\n")
            report = report_of(folder, NOW)
            assert all(said for _, said in report.text()[-1:])
            assert report.page().endswith("</html>\n")
            json.dumps(report.to_json(), allow_nan=False)


def test_a_line_that_was_cut_is_left_out_and_those_after_it_are_read(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": 1 / step}) for step in range(1, 6)]
    text = "\n".join([lines[0], lines[1][:9], *lines[2:4], lines[4][:-3]])
    (tmp_path / "measures.jsonl").write_text(text)
    assert read_run(tmp_path).steps.step.tolist() == [1, 3, 4]
    (tmp_path / "measures.jsonl").write_text("\n".join(lines))
    assert read_run(tmp_path).steps.step.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("cut", [0, 1, 100, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_lines_are_whole_wherever_a_block_of_the_file_ends(tmp_path: Path, cut: int) -> None:
    lines: list[dict[str, Any]] = [{"step": 0, "text": "x" * cut}]
    lines += [{"step": step, "text": "y" * (step % 977)} for step in range(1, 1500)]
    path = tmp_path / "measures.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert [line for block in json_lines(path) for line in block] == lines


def test_parts_of_a_folder_are_a_report_too(tmp_path: Path) -> None:
    for missing in ("measures.jsonl", "events.jsonl"):
        folder = write_run(tmp_path / f"without-{missing}", RESTARTED)
        (folder / missing).unlink()
        report = report_of(folder, NOW)
        assert "</html>" in report.page()
        assert [said for _, said in report.text()][-1]
    for key in (
        "seconds",
        "time",
        "step",
        "loss",
        "samples",
        "tokens",
        "rank_seconds",
        "attempt",
        "flops",
        "memory",
    ):
        folder = write_run(
            tmp_path / f"no-{key}", Synthetic(starts=(Start(1, 50, ends=END),), left_out=(key,))
        )
        report = report_of(folder, NOW)
        assert "</html>" in report.page(), key
        json.dumps(report.to_json(), allow_nan=False)


def test_random_damage_does_not_stop_the_reader(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Synthetic(starts=(Start(1, 60, ends=END),)))
    whole = {name: (folder / name).read_bytes() for name in ("measures.jsonl", "events.jsonl")}
    generator = random.Random(0)
    for _ in range(40):
        for name, content in whole.items():
            damaged = bytearray(content)
            for _ in range(generator.randrange(1, 30)):
                damaged[generator.randrange(len(damaged))] = generator.randrange(256)
            (folder / name).write_bytes(bytes(damaged[: generator.randrange(len(damaged))]))
        report = report_of(folder, NOW)
        json.dumps(report.to_json(), allow_nan=False)
        assert report.page().endswith("</html>\n")


def test_a_project_is_named_by_its_folder(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "gpt" / "run", Synthetic(starts=(Start(1, 5, ends=END),)))
    for path in (folder, folder.parent, folder / "measures.jsonl", folder / "events.jsonl"):
        run = read_run(path)
        assert (run.name, run.path) == ("gpt", folder)
    older = write_run(tmp_path / "gpt" / "run.2", Synthetic(starts=(Start(1, 5, ends=END),)))
    assert read_run(older).name == "gpt.2"
    assert read_run(write_run(tmp_path / "alone", Synthetic(starts=(Start(1, 5),)))).name == "alone"


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "measures.jsonl")
    for path, reason in (
        ("empty", "contains neither"),
        ("nothing", "does not exist"),
        ("pipe", "contains neither"),
        ("a\0b", "does not exist"),
    ):
        with pytest.raises(ConfigError, match=reason):
            read_run(tmp_path / path)


def test_pipes_and_links_to_nowhere_have_no_lines(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "start", "time": 1}\n')
    os.mkfifo(tmp_path / "measures.jsonl")
    assert len(read_run(tmp_path).steps) == 0


def test_checkpoints_on_disk_are_told_from_removed_ones(tmp_path: Path) -> None:
    run = Synthetic(starts=(Start(1, 40, ends=END),), save_every=10)
    folder = write_run(tmp_path / "gpt" / "run", run)
    assert read_run(folder).on_disk == {}  # nothing is known of a copy that was brought elsewhere
    (tmp_path / "gpt" / "checkpoints" / "checkpoint_40").mkdir(parents=True)
    assert read_run(folder).on_disk == {
        f"checkpoints/checkpoint_{step}": step == 40 for step in (10, 20, 30, 40)
    }


def test_numbers_of_an_empty_run(tmp_path: Path) -> None:
    (tmp_path / "measures.jsonl").touch()
    numbers = numbers_of(read_run(tmp_path), NOW)
    assert sentences(numbers) == ["No optimizer step was written.", "It has not made a step yet."]
    assert to_json(numbers)["steps"] == 0


def test_a_checkpoint_is_removed_only_where_its_project_is(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    paths = [tmp_path / "gone" / "checkpoints" / "checkpoint_0", tmp_path / "checkpoints" / "checkpoint_0"]
    lines = [json.dumps({"event": "checkpoint", "path": str(path)}) for path in paths]
    (tmp_path / "run" / "events.jsonl").write_text("\n".join(lines))
    assert read_run(tmp_path).on_disk == {str(paths[1]): False}
