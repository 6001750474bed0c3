"""``lockstep estimate``: what it prints, and how it refuses bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.calling import call, check_refused

USER = """
import torch
def make(width=100, depth=8):
    print("made")
    blocks = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width)) for _ in range(depth)]
    return torch.nn.Sequential(*blocks)
class Trouble(Exception):
    pass
def fails():
    raise Trouble("x" * 10_000 + "\\n\\x1b[31mred")
"""
BLOCK = 2 * (100 * 100 + 100)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "user.py").write_text(USER)
    return f"{tmp_path / 'user.py'}:make"


def estimate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, _ = call(capsys, "estimate", *arguments, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_counts_and_rows_as_json(capsys: pytest.CaptureFixture[str], model: str) -> None:
    found = estimate(capsys, model, "--args", '{"depth": 10}', "--ranks", "2", "--optimizer", "sgd")
    assert (found["parameters"], found["blocks"], found["dtypes"]) == (
        10 * BLOCK,
        10,
        {"float32": 10 * BLOCK},
    )
    assert found["largest"] == {"name": "0", "bytes": 4 * BLOCK}
    ddp = next(row for row in found["training"] if row["parallel"] == "ddp" and row["precision"] == "no")
    assert (ddp["device"], ddp["host"], ddp["disk"], ddp["fits"]) == (3 * 4 * 10 * BLOCK, 0, 0, None)
    assert found["suggestions"] == {}


def test_a_number_of_parameters_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    found = estimate(capsys, "1.6B", "--ranks", "8", "--precision", "no")
    assert (found["parameters"], found["blocks"]) == (1_600_000_000, 32)
    devices = {row["parallel"]: row["device"] for row in found["training"]}
    # 16 bytes on each rank and the buckets of DDP; or an eighth of them, and two blocks that are gathered
    assert devices["ddp"] > 16 * 1_600_000_000 > devices["zero=3"] > 2 * 1_600_000_000


def test_the_time_of_averages_by_kind(capsys: pytest.CaptureFixture[str], model: str) -> None:
    """Of 8 blocks' gradients at 1 MB a second: a ring's 2 (N - 1) / N, and a server's 2 N."""
    once = 4 * 8 * BLOCK / 1e6
    found = estimate(capsys, model, "--ranks", "1,2,8", "--bandwidth", "1MB")["averaging"]
    assert [row["ranks"] for row in found] == [1, 2, 8]
    assert [row["ring"] for row in found] == pytest.approx([0, once, 14 / 8 * once])
    assert [row["parameter_server"] for row in found] == pytest.approx([0, 4 * once, 16 * once])
    code, out, _ = call(capsys, "estimate", model, "--ranks", "8", "--bandwidth", "1MB")
    assert code == 0 and "ring" in out and f"{16 * once:,.3g} s" in out
    assert estimate(capsys, model)["averaging"] == []
    check_refused(capsys, ["estimate", model, "--bandwidth", "none"], "--bandwidth")


def test_what_is_suggested_fits_and_is_the_cheapest(capsys: pytest.CaptureFixture[str], model: str) -> None:
    whole = 16 * 8 * BLOCK
    plenty = estimate(capsys, model, "--memory", str(whole), "--ranks", "1")["suggestions"]
    assert plenty["train on 1 process in fp32"] == 'Accelerator(parallel="auto")'
    assert plenty["run in float32"] == "model.to(device)"
    less = estimate(capsys, model, "--memory", str(whole - 1), "--ranks", "1")["suggestions"]
    assert less["train on 1 process in bf16"] == (
        'Accelerator(parallel="offload=optimizer", mixed_precision="bf16")'
    )
    on_disk = ("--memory", str(4 * 6 * BLOCK), "--host-memory", str(16 * 3 * BLOCK), "--ranks", "1")
    little = estimate(capsys, model, *on_disk)["suggestions"]
    assert little["train on 1 process in fp32"] == 'Accelerator(parallel="offload offload_to=FOLDER")'
    assert little["run in float32"] == (
        'load_checkpoint_and_dispatch(model, CHECKPOINT, device_map="auto", max_memory={0: 484800, "cpu": 969600})'
    )
    nothing = estimate(capsys, model, "--memory", "1KB", "--ranks", "1")["suggestions"]
    assert set(nothing.values()) == {"nothing fits"}


def test_the_text_says_what_fits_and_what_is_not_counted(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    code, out, err = call(
        capsys, "estimate", model, "--memory", "1MiB", "--host-memory", "1GB", "--ranks", "1,3"
    )
    assert (code, err) == (0, "made\n")
    text = " ".join(out.split())
    for words in (
        "161,600 parameters", "8 blocks", "To train it on 3 processes", "zero=3 offload offload_to=FOLDER",
        "The cheapest", "Not counted: activations (give --batch and --sequence)",
    ):  # fmt: skip
        assert words in text
    code, out, _ = call(capsys, "estimate", model, "--ranks", "1", "--precision", "fp16")
    assert code == 0 and "Give --memory" in out
    assert not any(line.split()[-1:] == ["fits"] for line in out.splitlines())


def test_on_a_cpu_host_and_device_are_one_memory(capsys: pytest.CaptureFixture[str], model: str) -> None:
    rows = {row["parallel"]: row for row in estimate(capsys, model, "--cpu", "--ranks", "1")["training"]}
    assert set(rows) == {"auto", *(f"offload={word} offload_to=FOLDER" for word in ("optimizer", "params")),
                         "offload offload_to=FOLDER"}  # fmt: skip
    assert {row["host"] for row in rows.values()} == {0}
    assert rows["offload=optimizer offload_to=FOLDER"]["disk"] == 8 * 8 * BLOCK
    assert rows["auto"]["device"] == 16 * 8 * BLOCK
    # weights 4 blocks, gradients 2; and 3 blocks of 16 bytes that the optimizer steps
    assert rows["offload offload_to=FOLDER"]["device"] == (4 * 4 + 4 * 2 + 16 * 3) * BLOCK


def test_activations_are_counted_when_a_batch_is_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 90})
    )
    size = ("--batch", "2", "--sequence", "8", "--ranks", "2")
    found = estimate(capsys, str(path), *size)
    rows = {row["parallel"]: row for row in found["training"] if row["precision"] == "no"}
    kept = found["activations"]["no"]
    assert (
        rows["ddp"]["activations"]
        == kept["none"]
        > rows["ddp activation=full"]["activations"]
        == kept["full"]
        > 0
    )
    assert rows["ddp"]["device"] - kept["none"] == rows["ddp activation=full"]["device"] - kept["full"]
    code, out, _ = call(capsys, "estimate", str(path), *size)
    assert code == 0 and "Activations on a rank" in out and "bf16 with ZeRO" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "is not a file, a folder"),
        (["1.5"], "MODEL='1.5' is not a whole number"),
        (["1e99"], "MODEL='1e99' is not a whole number"),
        (["MODEL", "--memory", "much"], "--memory='much' is not a size"),
        (["MODEL", "--memory", "-3GB"], "is not a size"),
        (["MODEL", "--ranks", "0"], "--ranks=0 is not an integer from 1"),
        (["MODEL", "--ranks", ",".join("1" * 17)], "--ranks has 17 numbers"),
        (["MODEL", "--precision", "fp64"], "--precision=fp64"),
        (["MODEL", "--optimizer", "adamm"], "Did you mean 'adam'?"),
        (["MODEL", "--args", "[1]"], "--args: the top level"),
        (["MODEL", "--args", "{"], "--args:1: not valid JSON"),
        (["MODEL", "--args", '{"width": 100000000}'], "from 1 to 1000000000000000"),
        (["MODEL", "--batch", "2"], "Give both"),
        (["MODEL", "--cpu", "--host-memory", "1GB"], "as --memory"),
        (["FAILS"], "Trouble: xxx"),
    ],
)
def test_bad_input_is_exit_code_2_and_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    names = {"MODEL": model, "FAILS": model.replace(":make", ":fails")}
    given = [names.get(word, word) for word in arguments]
    check_refused(capsys, ["estimate", *given], message)
