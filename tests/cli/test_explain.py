"""``lockstep env --explain``: what it prints, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from cli import calling
from lockstep.plan import TABLE
from lockstep.utils import Parallel


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return calling.call(capsys, "env", *arguments)


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    code, out, err = call(capsys, "--explain", *arguments, "--json")
    assert (code, err) == (0, "")
    found: list[dict[str, Any]] = json.loads(out)["rows"]
    return found


def test_json_has_the_bytes_of_every_rank_count(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "zero=3", "--params", "1.6B", "--ranks", "1,2,8")
    assert [row["ranks"] for row in found] == [1, 2, 8]
    assert [row["at_rest"] for row in found] == [25_600_000_000, 12_800_000_000, 3_200_000_000]
    assert [row["sent"]["total"] for row in found] == [0, 4 * 3 * 800_000_000, 4 * 3 * 1_400_000_000]


def test_all_compares_ddp_and_the_stages(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "all", "--ranks", "4", "--params", "1e9")
    assert [row["parallel"] for row in found] == ["ddp", "zero=1", "zero=2", "zero=3"]
    assert [row["textbook"] for row in found] == [16 * 10**9, 10 * 10**9, 7 * 10**9, 4 * 10**9]


def test_a_table_has_gibibytes_types_and_what_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--explain", "all", "--params", str(2**30), "--ranks", "2,4")
    assert code == 0
    cells = [line.split() for line in out.splitlines()]
    (ddp,) = [line for line in cells if line[:2] == ["4", "ddp"]]
    (zero,) = [line for line in cells if line[:2] == ["4", "zero=2"]]
    assert ddp[2:10] == ["4.00", "4.00", "8.00", "4.00", "20.0", "20.0", "16.0", "6.00"]
    assert zero[2:7] == ["1.00", "1.00", "2.00", "0", "4.00"]
    assert "GiB" in out and "Not counted: activations" in out
    assert [tensor for tensor in TABLE if tensor not in out] == []


def test_a_bar_shows_how_the_parts_share_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capsys, "--explain", "zero=3", "--ranks", "1,2", "--blocks", "1000")
    bars = [line.split()[-1] for line in out.splitlines() if line.lstrip()[:2] in ("1 ", "2 ")]
    assert [{mark: bar.count(mark) for mark in "█▓▒░"} for bar in bars] == [
        {"█": 5, "▓": 5, "▒": 10, "░": 0},
        {"█": 2, "▓": 3, "▒": 5, "░": 0},
    ]


def test_a_number_of_ranks_that_cannot_be_has_its_reason_in_its_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = rows(capsys, "zero=3 replicate=2", "--ranks", "3,4")
    assert "3 / 2 is not whole" in found[0]["reason"]
    assert found[1]["at_rest"] == 8 * 10**9
    code, out, _ = call(capsys, "--explain", "zero=3 replicate=2", "--ranks", "3,4")
    assert code == 0
    assert "Set replicate to a divisor of 3." in " ".join(out.split())


def test_options_change_what_they_name(capsys: pytest.CaptureFixture[str]) -> None:
    plain = rows(capsys, "zero=2", "--ranks", "2")[0]
    assert rows(capsys, "zero=2", "--ranks", "2", "--optimizer", "sgd")[0]["optimizer"] == 0
    assert (
        rows(capsys, "zero=2", "--ranks", "2", "--precision", "bf16")[0]["sent"]["total"] * 2
        == plain["sent"]["total"]
    )
    assert rows(capsys, "zero=3", "--ranks", "2", "--blocks", "10")[0]["gathered_weights"] == 4 * 2 * 10**8
    three = rows(capsys, "zero=2", "--ranks", "2", "--gradient-accumulation-steps", "3")[0]
    assert three["sent"]["reduce_scatter"] == 3 * plain["sent"]["reduce_scatter"]
    offloaded = rows(capsys, "zero=3 offload", "--ranks", "2")[0]
    assert (offloaded["host"], offloaded["device"]) == (8 * 10**9, 0)
    assert offloaded["homes"]["weights"] == "host"
    on_disk = rows(capsys, "offload offload_to=/disk", "--ranks", "1", "--blocks", "10")[0]
    assert (on_disk["disk"], on_disk["device"], on_disk["peak"]) == (16 * 10**9, 0, 24 * 10**8)


@pytest.mark.parametrize(
    "text",
    [
        "ddp",
        "auto",
        "dataparallel",
        "zero=1",
        "zero=3 hpz=2 activation=full",
        "zero=2 offload",
        "offload=optimizer offload_to=/disk",
        "zero=3 blocks=a.*",
    ],
)
def test_every_parallel_has_a_table(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "--explain", text, "--precision", "fp16", "--ranks", "1,4,6,1000000")
    assert (code, err) == (0, "")
    assert str(Parallel.parse(text)) in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--explain", "zero=4"], "zero=4"),
        (["--explain", "zreo=3"], "Did you mean 'zero'?"),
        (["--explain", "all zero=3"], "parallel has no word 'all'"),
        (["--explain", "ddp", "--ranks", "0"], "--ranks=0 is not an integer from 1"),
        (["--explain", "ddp", "--ranks", ""], "--ranks= is not an integer"),
        (["--explain", "ddp", "--ranks", "2,,4"], "--ranks= is not an integer"),
        (["--explain", "ddp", "--ranks", "9" * 400], "--ranks=999"),
        (["--explain", "ddp", "--ranks", ",".join(["1"] * 65)], "--ranks has 65 numbers"),
        (["--explain", "ddp", "--params", "-3"], "--params='-3' is not a whole number"),
        (["--explain", "ddp", "--params", "9" * 5000], "is not a whole number"),
        (["--explain", "ddp", "--params", "1e99"], "--params='1e99' is not a whole number"),
        (["--explain", "ddp", "--params", "10", "--blocks", "11"], "--blocks=11"),
        (["--explain", "ddp", "--precision", "fp64"], "--precision=fp64 is not one of"),
        (["--explain", "ddp", "--optimizer", "adamm"], "Did you mean 'adam'?"),
        (["--explain", "ddp", "--gradient-accumulation-steps", "0"], "--gradient-accumulation-steps=0"),
        (["--params", "1B"], "--params belongs to --explain"),
    ],
)
def test_bad_input_is_exit_code_2_and_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    calling.check_refused(capsys, ["env", *arguments], message)


def test_explaining_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom lockstep.cli import run_lockstep\n"
        "try: run_lockstep(['env', '--explain', 'all'])\n"
        "finally: assert not {'torch', 'pydantic'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30, capture_output=True)
