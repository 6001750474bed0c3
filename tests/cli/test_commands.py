from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from cli.calling import call
from lockstep.cli import COMMANDS, value_type
from lockstep.config import DECLARED
from tests.compat.accelerate_examples import TWO_PROCESSES


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["env", "--no-torch"],
        ["config", "--yes", "--cpu", "--config-file", "c.yaml"],
        ["launch", "--help"],
        ["checkpoint", "--help"],
        ["checkpoint", "verify", "--help"],
        ["schedule", "1f1b", "--micro-batches", "2"],
        ["estimate", "--help"],
    ],
)
def test_light_commands_import_nothing_that_takes_long(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\nfrom lockstep.cli import run_lockstep\n"
        "try: run_lockstep(sys.argv[1:])\n"
        "finally:\n"
        "    light = {'pydantic'} if sys.argv[1] == 'config' else set()\n"
        "    assert not ({'torch', 'pydantic', 'numpy', 'transformers'} - light) & set(sys.modules), 'imported'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == (2 if "1f1b" in arguments else 0), done.stderr


def test_help_shows_examples_for_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        code, out, _ = call(capsys, name, "--help")
        assert code == 0
        assert f"lockstep {name}" in out.partition("Examples:")[2]


def test_dry_run_shows_command_environment_and_origins(
    capsys: pytest.CaptureFixture[str], script: Path
) -> None:
    file = script.parent / "run.yaml"
    file.write_text(TWO_PROCESSES)
    code, out, _ = call(
        capsys,
        "launch",
        "--config_file",
        file,
        "--mixed_precision",
        "bf16",
        "--dry-run",
        script,
        "--lr",
        "a b",
    )
    assert code == 0
    assert f"{sys.executable} {script} --lr 'a b'" in out
    assert "LOCKSTEP_MIXED_PRECISION=bf16" in out
    assert "flag --mixed-precision" in out
    assert "run.yaml:10: num_processes" in out


def test_command_lines_of_accelerate_launch_work(capsys: pytest.CaptureFixture[str], script: Path) -> None:
    line = (
        "--num_processes 2 --num_machines 1 --machine_rank 0 --mixed_precision=fp16 --cpu --same_network "
        "--num_cpu_threads_per_process 1 --main_process_port 0 --gradient_accumulation_steps 2 --rdzv_backend static"
    )
    code, out, err = call(capsys, "launch", *line.split(), "--dry-run", script)
    assert (code, err) == (0, "")
    assert "LOCKSTEP_GRADIENT_ACCUMULATION_STEPS=2" in out
    assert (
        call(capsys, "launch", "--multi_gpu", "--gpu_ids", "0,1", "--num_processes", 2, "--dry-run", script)[
            0
        ]
        == 0
    )


def test_the_users_own_file_is_used_and_said(
    capsys: pytest.CaptureFixture[str], script: Path, no_user_file: Path
) -> None:
    assert call(capsys, "config", "--num-processes", 3, "--cpu")[0] == 0
    code, out, err = call(capsys, "launch", "--dry-run", script)
    assert (code, err) == (0, f"lockstep: settings from {no_user_file}\n")
    assert "3 processes on this machine" in out


def test_config_asks_when_nothing_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_user_file: Path
) -> None:
    import io

    answers = "2 1 10.0.0.1 29500 y 4 bf16 3 y y 8"
    monkeypatch.setattr("sys.stdin", io.StringIO(answers.replace(" ", "\n") + "\n"))
    assert call(capsys, "config")[0] == 0
    written = yaml.safe_load(no_user_file.read_text())
    assert (written["num_machines"], written["machine_rank"], written["main_process_ip"]) == (
        2,
        1,
        "10.0.0.1",
    )
    assert (written["use_cpu"], written["num_processes"], written["mixed_precision"]) == (True, 4, "bf16")
    assert (written["parallel"], written["gradient_accumulation_steps"]) == (
        "zero=3 offload activation=full",
        8,
    )


@pytest.mark.parametrize(
    ("gpus", "processes", "cpu", "precision"), [(0, 1, True, "no"), (4, 4, False, "bf16")]
)
def test_answers_by_enter_are_those_of_this_machine(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    no_user_file: Path,
    tmp_path: Path,
    gpus: int,
    processes: int,
    cpu: bool,
    precision: str,
) -> None:
    import io

    tool = tmp_path / "bin" / "nvidia-smi"  # the driver's own list, as `nvidia-smi -L` prints it
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {index}: H100 (UUID: x)'\n" for index in range(gpus)))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent))
    monkeypatch.setattr("sys.stdin", io.StringIO("\n" * 12))
    code, out, _ = call(capsys, "config")
    assert code == 0
    assert out.count("]: ") <= 8
    written = yaml.safe_load(no_user_file.read_text())
    assert written == {
        "num_machines": 1,
        "use_cpu": cpu,
        "num_processes": processes,
        "mixed_precision": precision,
        "gradient_accumulation_steps": 1,
    }


def test_config_does_not_overwrite_unasked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import io

    path = tmp_path / "c.yaml"
    path.write_text("mine")
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert call(capsys, "config", "--yes", "--config-file", path)[0] == 1
    assert path.read_text() == "mine"


def test_env_prints_json_and_no_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "a secret")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    code, out, _ = call(capsys, "env", "--no-torch", "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["$NCCL_DEBUG"] == "INFO"
    assert "a secret" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lanch"], "Did you mean 'launch'?"),
        (["launch"], "Missing argument 'SCRIPT'"),
        (["launch", "--nproc", "-4", "x.py"], "'-4' is not an integer from 1 to 1000000"),
        (["launch", "--nproc", "abc", "x.py"], "'abc' is not an integer from 1 to 1000000"),
        (["launch", "--nprc", "2", "x.py"], "'--nproc'?"),
        (["launch", "missing.py"], "the script 'missing.py' does not exist"),
        (
            ["launch", "--use_megatron_lm", "SCRIPT"],
            "--use-megatron-lm asks for Megatron-LM settings, which is not available",
        ),
        (["launch", "--nproc", "2", "--num-processes", "2", "SCRIPT"], "Give one of them"),
        (["launch", "--cpu", "--multi-gpu", "SCRIPT"], "contradict each other"),
        (["launch", "--tee", "SCRIPT"], "there is no --log-dir"),
        (["launch", "--config-file", "/nonexistent.yaml", "SCRIPT"], "cannot read the configuration file"),
        (["launch", "--main-process-ip", "1.2.3", "SCRIPT"], "is not a host name or IP address"),
        (
            ["config", "--num-processes", "3", "--num-machines", "2", "--config-file", "/tmp/none.yaml"],
            "main_process_ip",
        ),
    ],
)
def test_bad_input_is_exit_code_2_and_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], script: Path
) -> None:
    code, _, err = call(capsys, *(str(script) if word == "SCRIPT" else word for word in arguments))
    assert code == 2
    assert message in err
    assert err.count("lockstep: error: ") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parallel", "zero3"], "Did you mean 'zero=3'?\n"),
        (["--parallel", "TP-2"], "Did you mean 'tp=2'?\n"),
        (["--nnodes", "2"], "--nnodes is 2, but --main-process-ip is not set"),
        (["--nnodes", "2"], "Add --rdzv HOST:PORT to the command on every machine"),
        (["--nnodes", "2", "--rdzv", "a:1", "--node-rank", "5"], "--node-rank is 5 with --nnodes 2"),
        (["--nproc", "2", "--gpu-ids", "0"], "--gpu-ids names 1 GPUs"),
        (["--parallel", "fsdp"], "Did you mean 'zero=3'?\n"),
        (["run.yaml"], "Write --config-file run.yaml SCRIPT"),
        (["lockstep.py"], "hides the package lockstep"),
        (["--config-file", "lockstep.py"], "lockstep.py is a script, not a configuration file"),
    ],
)
def test_errors_have_the_words_that_were_typed(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(script.parent)
    Path("run.yaml").touch()
    Path("lockstep.py").touch()
    code, _, err = call(capsys, "launch", *arguments, script)
    assert (
        code == 2 and message in err and not re.search(r"num_machines|machine_rank|gpu_ids|main_process", err)
    )


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        (
            "import torch\nloss.backward()\n",
            ["--nproc", "2"],
            "each of the 2 processes trains the whole script",
        ),
        ("import torch\nloss.backward()\n", ["--nproc", "1"], ""),
        ("import torch.distributed as dist\nloss.backward()\n", ["--nproc", "2"], ""),
        ("from trainer import main\nmain()\n", ["--nproc", "2"], ""),
        ("import lockstep\n", ["--nproc", "2", "--gpu-ids", "0,1"], "--gpu-ids asks for GPUs"),
    ],
)
def test_a_launch_says_what_a_script_will_not_do(
    text: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str], script: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    script.write_text(text)
    code, _, err = call(capsys, "launch", *flags, "--dry-run", script)
    assert code == 0 and (said in err if said else err == "")


def test_the_package_is_the_command_too() -> None:
    command = [sys.executable, "-m", "lockstep", "launch", "nothing.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith(
        "lockstep: error: the script 'nothing.py' does not exist."
    )


@pytest.mark.parametrize("arguments", [["help"], ["help", "launch"], ["help", "checkpoint", "verify"]])
def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert call(capsys, *arguments) == call(capsys, *arguments[1:], "--help")


def test_the_version_has_a_short_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "-V") == call(capsys, "--version")


def test_a_flag_after_the_script_is_noticed_unless_the_script_knows_it(
    capsys: pytest.CaptureFixture[str], script: Path
) -> None:
    arguments = (
        "launch",
        "--cpu",
        "--dry-run",
        script,
        "--nproc",
        "2",
        "--mixed_precision=bf16",
        "--epochs",
        "3",
    )
    code, _, said = call(capsys, *arguments)
    assert code == 0
    assert [line.split()[1] for line in said.splitlines()] == ["--nproc", "--mixed_precision"]
    assert f"write it before {script}" in said
    script.write_text('parser.add_argument("--nproc", "--mixed-precision")')
    assert call(capsys, *arguments)[2] == ""


@pytest.mark.parametrize("by_file", ["", "MULTI_GPU", "MULTI_XPU"])
def test_gpus_that_are_not_there_are_told(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    script: Path,
    tmp_path: Path,
    by_file: str,
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"distributed_type: {by_file}\nnum_processes: 2\n")
    flags = ["--config-file", file] if by_file else ["--nproc", 2, "--multi-gpu"]
    for there, lines in ((False, 1), (True, 0)):
        monkeypatch.setattr("torch.accelerator.is_available", lambda there=there: there)
        said = call(capsys, "launch", *flags, "--dry-run", script)[2]
        asks = f"{file}:1: distributed_type" if by_file else "--multi-gpu"
        assert said.count(f"{asks} asks for GPUs, but torch") == lines


SHARED = ("parallel", "mixed_precision", "module", "as_accelerate", "config_file", "nproc", "dry_run")
"""Settings that several commands take."""


def commands() -> Iterator[tuple[str, click.Command]]:
    for name, (place, _) in COMMANDS.items():
        module, _, attribute = place.partition(":")
        found = getattr(importlib.import_module(module), attribute or "command")
        if isinstance(found, click.Group):
            yield from ((f"{name} {sub}", command) for sub, command in found.commands.items())
        yield name, found


def test_flags_of_settings_are_those_of_the_table_in_every_command() -> None:
    taken = []
    for name, command in commands():
        for parameter in command.params:
            if parameter.name in SHARED and not name.startswith("accelerate"):
                setting = DECLARED[parameter.name]
                assert sorted(parameter.opts) == sorted(setting.flags.split()), name
                if not getattr(parameter, "is_flag", False):
                    assert type(parameter.type) is type(value_type(setting)), (name, parameter.name)
                taken.append((name, parameter.name))
    assert {("check", "parallel"), ("tune", "parallel"), ("replay", "module"), ("test", "nproc")} <= {*taken}


@pytest.mark.parametrize("command", ["check", "tune"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--parallel", ""], "has no word"),
        (["--config-file", "nofile.yaml"], "cannot read the configuration file"),
        (["--config-file", "two.yaml"], "main_process_ip"),
        (["--nproc", "4", "--parallel", "tp=3"], "4 / 3 is not whole"),
    ],
)
def test_what_a_launch_would_refuse_is_refused_before_the_script_runs(
    command: str,
    flags: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.yaml").write_text("num_machines: 2\nnum_processes: 4\n")
    Path("script.py").write_text("open('ran', 'w')\n")
    code, out, err = call(capsys, command, *flags, "script.py")
    assert (code, out) == (2, "")
    assert message in err and err.count("lockstep: error: ") == 1
    assert not Path("ran").exists()
