"""Accelerate's commands, with its arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.commands.accelerate_cli import main as their_main
from accelerate.commands.launch import launch_command_parser as their_launch_parser
from accelerate.utils import merge_fsdp_weights as their_merge
from safetensors.torch import load_file
from torch.distributed import checkpoint

from cli.calling import call, check_refused
from lockstep.cli import COMMANDS_OF_ACCELERATE, launch_command, launch_command_parser, load_config_from_file
from lockstep.compat.accelerate import load
from lockstep.errors import ConfigError
from tests.command import LOCKSTEP
from tests.compat.accelerate.their_config import ANSWERS, write
from tests.refusals import expect_refusal


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
    for name, instead in (
        ("estimate_memory", "lockstep estimate"),
        ("to-fsdp2", "as they are"),
        ("tpu-config", "GPUs"),
    ):
        code, _, err = call(capsys, "accelerate", name, "x", "--dtypes", "float32")
        assert code == 1 and instead in err


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
    for title in ("process group", "reduce", "broadcast", "data order", "gradient"):
        assert title in done.stdout


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
    check_refused(capsys, ["merge-weights", *inside], "which is to be removed")
    assert (folder / ".metadata").exists()
    check_refused(capsys, ["merge-weights", str(tmp_path / "none"), str(tmp_path / "out")], "none")


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
