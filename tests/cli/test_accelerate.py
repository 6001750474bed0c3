"""Accelerate's commands, with its arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import yaml
from accelerate.commands.accelerate_cli import main as their_main
from accelerate.commands.launch import launch_command_parser as their_launch_parser
from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2
from accelerate.utils import merge_fsdp_weights as their_merge
from safetensors.torch import load_file
from torch.distributed import checkpoint

from cli.calling import call, check_refused
from lockstep.cli import COMMANDS_OF_ACCELERATE, launch_command, launch_command_parser, load_config_from_file
from lockstep.compat.accelerate import load
from lockstep.errors import ConfigError
from lockstep.utils import Parallel
from tests.command import LOCKSTEP
from tests.compat.accelerate.their_config import ANSWERS, write
from tests.refusals import expect_refusal


@pytest.fixture(autouse=True)
def no_user_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    for name in ("LOCKSTEP_CONFIG_FILE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.touch()
    return path


def test_the_commands_are_those_of_accelerate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["accelerate", "--help"])
    with pytest.raises(SystemExit):
        their_main()
    theirs = set(capsys.readouterr().out.partition("{")[2].partition("}")[0].split(","))
    assert "launch" in theirs
    assert theirs == set(COMMANDS_OF_ACCELERATE)
    for name in COMMANDS_OF_ACCELERATE:
        assert call(capsys, "accelerate", name, "--help")[0] == 0
        assert call(capsys, "accelerate", name.replace("-", "_"), "--help")[0] == 0
    check_refused(capsys, ["accelerate", "lanch"], "Did you mean 'launch'?")


# -- launch --------------------------------------------------------------------------------------------------


def test_under_its_name_a_script_imports_lockstep_as_accelerate(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = call(capsys, "accelerate", "launch", "--num_processes", 2, "--dry-run", script)[1].splitlines()[
        1
    ]
    assert command.split() == [sys.executable, "-m", "lockstep.compat.accelerate", str(script)]
    code, out, _ = call(capsys, "accelerate", "launch", "--no_python", "--dry-run", "/bin/true")
    assert (code, out.splitlines()[1].strip()) == (0, "/bin/true")
    command = call(capsys, "launch", "--num_processes", 2, "--dry-run", script)[1].splitlines()[1]
    assert command.split() == [sys.executable, str(script)]


def test_workers_are_told_in_accelerates_words_too(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers.TrainingArguments reads these variables and passes defaults on: flags would be lost."""
    flags = [
        "--mixed_precision",
        "bf16",
        "--dynamo_backend",
        "eager",
        "--gradient_accumulation_steps",
        3,
        "--cpu",
    ]
    for words, there in (
        (["launch", "--as-accelerate"], True),
        (["accelerate", "launch"], True),
        (["launch"], False),
    ):
        out = call(capsys, *words, *flags, "--dry-run", script)[1]
        for name, value in (("MIXED_PRECISION", "bf16"), ("DYNAMO_BACKEND", "eager"), ("USE_CPU", "true")):
            assert f"LOCKSTEP_{name}={value}" in out
            assert (f"ACCELERATE_{name}={value}" in out) == there
        assert ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS=3" in out) == there


def test_the_file_that_accelerate_config_wrote_is_the_default_under_its_name_alone(
    script: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    theirs = tmp_path / "hub" / "accelerate" / "default_config.yaml"
    theirs.parent.mkdir(parents=True)
    write(theirs, ANSWERS["several CPU processes"])
    code, out, err = call(capsys, "accelerate", "launch", "--dry-run", script)
    assert (code, f"settings from {theirs}" in err) == (0, True)
    assert out.startswith("4 processes on this machine")
    assert call(capsys, "launch", "--cpu", "--dry-run", script)[1].startswith("1 processes")
    assert call(capsys, "accelerate", "launch", "--cpu", "--dry-run", script)[1].startswith("1 processes")
    assert call(capsys, "config", "--num-processes", 3, "--cpu")[0] == 0
    # The user's own file comes before that of accelerate.
    assert call(capsys, "accelerate", "launch", "--dry-run", script)[1].startswith("3 processes")


# -- config --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling", [["--config_file", "--mixed_precision"], ["--config-file", "--mixed-precision"]]
)
def test_config_default_writes_a_file_and_replaces_none(
    spelling: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    line = ["accelerate", "config", "default", spelling[0], path, spelling[1], "bf16"]
    assert call(capsys, *line)[0] == 0
    config = load(path).config
    assert (config.mixed_precision, config.use_cpu) == ("bf16", not torch.cuda.is_available())
    path.write_text("mine")
    code, out, err = call(capsys, *line)
    assert (code, out, path.read_text()) == (0, "", "mine")
    assert "was left as it is" in err


@pytest.mark.parametrize("name", [name for name in ANSWERS if "machines" not in name])
def test_config_update_changes_nothing_in_a_file_of_today(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    write(path, ANSWERS[name])
    before = yaml.safe_load(path.read_text())
    capsys.readouterr()  # what Accelerate printed
    said = call(capsys, "config", "update", "--config_file", path)
    assert said[:2] == (0, f"Updated {path}: nothing changed.\n")
    assert yaml.safe_load(path.read_text()) == before


def test_config_update_renames_old_keys_and_adds_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\ndynamo_backend: INDUCTOR\n")
    before = load(path).config.given()
    assert call(capsys, "config", "update", "--config-file", path)[0] == 0
    written = yaml.safe_load(path.read_text())
    assert "dynamo_backend" not in written
    assert (written["dynamo_config"], written["use_cpu"]) == ({"dynamo_backend": "INDUCTOR"}, True)
    after = load(path).config.given()
    assert {name: after[name] for name in before} == before
    path.write_text("num_proceses: 2\n")
    check_refused(capsys, ["config", "update", "--config_file", str(path)], "Did you mean 'num_processes'?")


# -- test, env -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FSDP 2", pytest.param("compiled on CPUs", marks=pytest.mark.exhaustive)])
def test_the_self_check_runs_as_a_file_says(name: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    write(path, {**ANSWERS[name], "mixed precision": "no"} if name == "FSDP 2" else ANSWERS[name])
    words = ["accelerate", "test", "--config_file", str(path), "--nproc", "2", "--cpu"]
    done = subprocess.run([*LOCKSTEP, *words], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert "All 5 checks passed." in done.stdout
    assert "2 processes on cpu" in done.stdout


def test_env_shows_what_a_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    write(path, ANSWERS["FSDP 2"])
    code, out, _ = call(capsys, "accelerate", "env", "--config_file", path, "--no-torch", "--json")
    facts = json.loads(out)
    assert (code, facts["configuration"]) == (0, str(path))
    assert (facts["configuration: parallel"], facts["configuration: num_processes"]) == ("zero=3", "8")
    check_refused(capsys, ["env", "--config_file", str(tmp_path / "none.yaml")], "cannot read")


# -- merge-weights -------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    folder = tmp_path / "run" / "pytorch_model_fsdp_0"
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    return folder, model.state_dict()


@pytest.mark.filterwarnings("ignore")
def test_sharded_weights_are_merged_as_accelerate_merges_them(
    sharded: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, weights = sharded
    their_merge(str(folder), str(tmp_path / "theirs"))
    assert call(capsys, "accelerate", "merge-weights", folder, tmp_path / "ours")[0] == 0
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert theirs.keys() == ours.keys() == weights.keys()
    assert all(torch.equal(ours[name], weights[name]) for name in weights)
    assert [path.name for path in (tmp_path / "ours").iterdir()] == ["model.safetensors"]
    line = [
        "merge_weights",
        "--unsafe_serialization",
        "--remove_checkpoint_dir",
        folder,
        tmp_path / "pickled",
    ]
    assert call(capsys, *line)[0] == 0
    found = torch.load(tmp_path / "pickled" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert not folder.exists()
    assert call(capsys, "merge-weights", tmp_path / "ours", tmp_path / "again")[0] == 0
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == weights.keys()


def test_what_cannot_be_merged_is_refused(
    sharded: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = sharded
    check_refused(
        capsys, ["merge-weights", str(folder.parent), "out"], "has pytorch_model_fsdp_0. Name one of them."
    )
    inside = [str(folder), str(folder / "out"), "--remove-checkpoint-dir"]
    check_refused(capsys, ["merge-weights", *inside], "--remove-checkpoint-dir deletes")
    assert (folder / ".metadata").exists()
    check_refused(capsys, ["merge-weights", str(tmp_path / "none"), str(tmp_path / "out")], "none")


# -- estimate-memory -----------------------------------------------------------------------------------------


def test_memory_is_counted_by_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["estimate_memory", "torch.nn:Bilinear", "--dtypes", "float32", "bfloat16", "int4"]
    code, _, err = call(capsys, *line)
    # It needs arguments, which only `lockstep estimate` takes.
    assert (code, "in1_features" in err) == (2, True)
    line[1] = "tests.cli.test_accelerate:million"
    code, out, err = call(capsys, *line)
    assert code == 0, err
    rows = [line.split("  ") for line in out.splitlines() if line.startswith(("float", "bfloat", "int"))]
    cells = {row[0].strip(): [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    assert list(cells) == ["float32", "bfloat16", "int4"]
    # 2^20 weights: 4, 2 and half a byte each; Adam trains with weights, gradients and two moments in float32
    assert [cells[dtype][1] for dtype in cells] == ["4.00 MiB", "2.00 MiB", "512 KiB"]
    assert cells["float32"][2] == "16.0 MiB"
    assert cells["int4"][2] == "N/A"


def million() -> torch.nn.Module:
    return torch.nn.Linear(1024, 1024, bias=False)


def test_models_that_cannot_be_counted_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    check_refused(capsys, ["estimate-memory", "no-such/model"], "module:Class")
    check_refused(
        capsys, ["estimate-memory", "x", "--trust_remote_code"], "--trust-remote-code asks to run code"
    )
    check_refused(capsys, ["estimate-memory", "x", "--dtypes", "float64"], "'float64'")


# -- to-fsdp2 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name for name in ANSWERS if name.startswith("FSDP 1") and "replicas" not in name]
)
def test_a_file_for_fsdp_1_becomes_one_for_fsdp_2(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "one.yaml", tmp_path / "two.yaml"
    write(path, ANSWERS[name])
    assert call(capsys, "accelerate", "to-fsdp2", "--config_file", path, "--output_file", out)[0] == 0
    theirs = convert_config_to_fsdp2(yaml.safe_load(path.read_text()))
    ours = yaml.safe_load(out.read_text())
    assert ours["fsdp_config"] == theirs["fsdp_config"]
    # it means what it meant, which Accelerate's own loses for replicas
    before, after = (Parallel.parse(load(file).config.parallel) for file in (path, out))
    assert (before.zero, before.replicate, before.offload, before.activation, before.blocks) == (
        after.zero, after.replicate, after.offload, after.activation, after.blocks,
    )  # fmt: skip


def test_keys_without_their_prefix_keep_their_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.yaml"
    write(path, ANSWERS["FSDP 1"])
    file: dict[str, Any] = yaml.safe_load(path.read_text())
    plain = {key.removeprefix("fsdp_"): value for key, value in file["fsdp_config"].items()}
    plain |= {"version": 1, "state_dict_type": "LOCAL_STATE_DICT"}
    path.write_text(yaml.safe_dump(file | {"fsdp_config": plain}))
    before = load(path).config.parallel
    assert call(capsys, "to-fsdp2", "--config-file", path, "--overwrite")[0] == 0
    after = yaml.safe_load(path.read_text())["fsdp_config"]
    assert (after["version"], after["state_dict_type"]) == (2, "SHARDED_STATE_DICT")
    assert not any(key.startswith("fsdp_") for key in after)
    assert load(path).config.parallel == before


def test_to_fsdp2_replaces_no_file_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = tmp_path / "one.yaml", tmp_path / "two.yaml"
    write(path, ANSWERS["FSDP 1"])
    before: dict[str, Any] = yaml.safe_load(path.read_text())
    other.write_text("mine")
    words = ["to-fsdp2", "--config-file", str(path)]
    check_refused(capsys, words, "There is no --output-file")
    check_refused(capsys, [*words, "--output-file", str(other)], "was left as it is")
    check_refused(
        capsys, ["to-fsdp2", "--config_file", str(tmp_path / "none.yaml"), "--overwrite"], "none.yaml"
    )
    assert call(capsys, *words, "--overwrite")[0] == 0
    assert (
        yaml.safe_load(path.read_text())["fsdp_config"]["fsdp_version"]
        == 2
        != before["fsdp_config"]["fsdp_version"]
    )
    code, _, err = call(capsys, *words, "--overwrite")
    assert (code, "is for FSDP 2 already" in err) == (0, True)
    write(path, ANSWERS["FSDP 1, replicas"])
    check_refused(capsys, [*words, "--overwrite"], "NO_SHARD replicates the model")
    write(path, ANSWERS["one CPU"])
    check_refused(capsys, [*words, "--overwrite"], "has no section fsdp_config")


# -- functions that other libraries call ---------------------------------------------------------------------


def test_the_parser_of_launch_gives_accelerates_attributes(script: Path) -> None:
    for words in (
        ["--multi-gpu", "--num_processes", "4", "--use-fsdp", "--fsdp_sharding_strategy", "FULL_SHARD"],
        [
            "--cpu",
            "--config_file",
            "c.yaml",
            "--num-machines=1",
            "--mixed_precision",
            "bf16",
            "--same-network",
        ],
        ["--use_deepspeed", "--zero-stage", "3", "--dynamo_backend", "eager", "--module"],
    ):
        line = [*words, str(script), "--lr", "1"]
        ours, theirs = launch_command_parser().parse_args(line), their_launch_parser().parse_args(line)
        said = {
            word.partition("=")[0].lstrip("-").replace("-", "_") for word in words if word.startswith("--")
        }
        for name in (said & set(vars(theirs))) - {"same_network", "num_machines"} | {
            "training_script",
            "multi_gpu",
        }:
            assert str(getattr(ours, name)) == str(getattr(theirs, name)), name
        assert ours.training_script_args == ["--lr", "1"]
    changed = launch_command_parser().parse_args(["--num_processes", "2", str(script)])
    changed.num_processes = 4
    expect_refusal(ConfigError, "from 2 to 4", launch_command, changed)


def test_a_launch_by_a_function_returns_to_its_caller(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import accelerate, sys; print(accelerate.__version__); sys.exit(int(sys.argv[1]))")
    launch_command(launch_command_parser().parse_args(["--cpu", str(script), "0"]))
    assert capfd.readouterr().out.splitlines() == [accelerate.__version__]
    with pytest.raises(subprocess.CalledProcessError):
        launch_command(launch_command_parser().parse_args(["--cpu", str(script), "3"]))
    config = tmp_path / "config.yaml"
    config.write_text("compute_environment: LOCAL_MACHINE\nnum_proceses: 2\n")
    with pytest.raises(ValueError, match="num_proceses"):
        launch_command(launch_command_parser().parse_args(["--config_file", str(config), str(script), "0"]))


@pytest.mark.parametrize("further", ["", "parallel: zero=2\n"])
def test_an_unquoted_no_in_a_file_is_the_word_for_scripts_too(tmp_path: Path, further: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"distributed_type: NO\nmixed_precision: 'no'\n{further}")
    assert load_config_from_file(str(file)).to_dict()["distributed_type"] == "NO"
