"""``lockstep config convert``, and launching with what other libraries call sharding."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.calling import call
from lockstep.compat.accelerate import load
from tests.command import LOCKSTEP
from tests.compat.deepspeed_examples import STAGE2, STAGE3

FSDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
use_cpu: false
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


def write(name: str, content: Any) -> Path:
    path = Path(name)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_deepspeed_file_becomes_yaml_on_the_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = call(capsys, "config", "convert", write("ds.json", STAGE3), "--ranks", 4)
    assert code == 0
    assert yaml.safe_load(out) == {
        "num_processes": 4,
        "mixed_precision": "bf16",
        "parallel": "zero=3 hpz=2 reduce=fp32 quantized_weights=int8 quantized_gradients=int8 offload "
        "activation=offload",
        "gradient_accumulation_steps": 2,
        "micro_batch_size": 4,
        "gradient_clipping": 1.0,
    }


def test_a_converted_file_is_read_back_with_the_same_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "config", "convert", write("ds.json", STAGE2), "-o", "run.yaml")
    assert code == 0 and "Wrote run.yaml" in out
    config = load("run.yaml").config
    assert config.parallel == "zero=2"
    assert config.optimizer == STAGE2["optimizer"] and config.scheduler == STAGE2["scheduler"]
    assert config.grad_scaler == {"init_scale": 4096.0, "growth_interval": 1000}
    again = call(capsys, "config", "convert", "run.yaml", "-o", "again.yaml")
    assert again[0] == 0 and load("again.yaml").config == config


def test_a_key_without_effect_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "config", "convert", write("a.yaml", FSDP), "-o", "b.yaml")
    assert code == 0
    assert "fsdp_cpu_ram_efficient_loading=True has no effect" in err
    config = load("b.yaml").config
    assert (config.parallel, config.num_processes) == ("zero=3 activation=full blocks=Block", 4)


def test_batch_sizes_over_all_processes_need_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    path = write("ds.json", {"train_batch_size": 32, "zero_optimization": {"stage": 1}})
    code, _, err = call(capsys, "config", "convert", path)
    assert code == 2 and "Give --ranks N" in err
    code, out, _ = call(capsys, "config", "convert", path, "--ranks", 8)
    assert code == 0 and yaml.safe_load(out)["micro_batch_size"] == 4


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("ds.json", {"zero_optimization": {"stage": 9}, "foo": 1}, "zero_optimization.stage=9"),
        ("ds.json", "{", "not valid JSON"),
        ("ds.json", '{"a": NaN}', "NaN is not a value"),
        ("ds.json", "[" * 100_000, "nested"),
        ("a.yaml", "fsdp_config: {fsdp_sharding_strategi: 1}\n", "fsdp_sharding_strategi"),
        ("a.yaml", "megatron_lm_config: {a: 1}\n", "Megatron-LM"),
        ("a.yaml", "\x00", "not valid YAML"),
    ],
)
def test_bad_input_is_exit_code_2_and_one_message(
    name: str, content: Any, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "config", "convert", write(name, content))
    assert (code, out) == (2, "")
    assert err.count("lockstep: error: ") == 1 and sentence in err.partition("lockstep: error: ")[2]


def test_keys_of_services_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    path = write("ds.json", {"comet": {"enabled": True, "api_key": "a secret"}})
    code, out, err = call(capsys, "config", "convert", path)
    assert code == 0 and "comet.enabled" in err and "a secret" not in out + err


def test_an_existing_file_is_kept_unless_forced(capsys: pytest.CaptureFixture[str]) -> None:
    path = write("ds.json", STAGE2)
    write("run.yaml", "mine")
    assert call(capsys, "config", "convert", path, "-o", "run.yaml")[0] == 2
    assert Path("run.yaml").read_text() == "mine"
    assert call(capsys, "config", "convert", path, "-o", "run.yaml", "--force")[0] == 0


def test_options_of_config_do_not_go_before_convert(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "config", "--cpu", "convert", write("ds.json", STAGE2))
    assert code == 2 and "do not go before convert" in err


def test_config_writes_parallel_in_its_canonical_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "config", "--parallel", "activation=full zero=3", "--config-file", "c.yaml")[0] == 0
    assert load("c.yaml").config.parallel == "zero=3 activation=full"
    code, _, err = call(capsys, "config", "--parallel", "zer=3", "--config-file", "d.yaml")
    assert code == 2 and "Did you mean 'zero'?" in err and not Path("d.yaml").exists()


# -- launch --------------------------------------------------------------------------------------------


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return call(capsys, "launch", "--dry-run", *arguments, "train.py")


def test_the_dry_run_shows_parallel_and_where_it_is_from(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = dry_run(capsys, "--nproc", 4, "--parallel", "activation=full zero=3")
    assert code == 0
    assert "LOCKSTEP_PARALLEL=zero=3 activation=full" in out and "flag --parallel" in out
    code, out, _ = dry_run(capsys, "--config-file", write("a.yaml", FSDP))
    assert "LOCKSTEP_PARALLEL=zero=3 activation=full blocks=Block" in out


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--use_fsdp", "zero=3"),
        ("--use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP --fsdp_offload_params true", "zero=2 offload"),
        ("--use_deepspeed --zero_stage 1", "zero=1"),
        ("--use_deepspeed", "zero=2"),
        (
            "--parallelism_config_dp_replicate_size 2 --parallelism_config_dp_shard_size 2",
            "zero=3 replicate=2",
        ),
        ("--parallelism_config_tp_size 2 --parallelism_config_dp_shard_size 2", "zero=3 tp=2"),
        ("--parallelism_config_sp_size 4", "cp=4 cp_method=ulysses"),
    ],
)
def test_sharding_flags_of_accelerate_launch_work(
    flags: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = dry_run(capsys, "--num_processes", 4, *flags.split())
    assert code == 0, err
    assert f"LOCKSTEP_PARALLEL={expected}\n" in out


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        (["--nproc", 3, "--parallel", "zero=3 replicate=2"], ["3 / 2 is not whole"]),
        (["--parallel", "zer=3"], ["Did you mean 'zero'?"]),
        (["--nproc", 2, "--use_fsdp", "--parallel", "zero=2"], ["FULL_SHARD", "parallel='zero=2'"]),
        (["--nproc", 4, "--deepspeed_config_file", "ds.json", "--parallel", "zero=2"], ["stage=3", "zero=2"]),
        (
            ["--nproc", 4, "--deepspeed_config_file", "ds.json", "--mixed_precision", "fp16"],
            ["bf16.enabled=True", "mixed_precision='fp16'"],
        ),
        (["--nproc", 8, "--deepspeed_config_file", "ds.json"], ["x 8 processes = 64, not 32"]),
        (["--deepspeed_config_file", "none.json"], ["cannot read"]),
        (["--nproc", 3, "--parallelism_config_tp_size", 2], ["tp_size='2'", "3 processes (flag --nproc)"]),
        (
            ["--nproc", 3, "--parallelism_config_dp_shard_size", 2],
            ["dp_shard_size='2'", "3 processes (flag --nproc)"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    arguments: list[object], sentences: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write("ds.json", STAGE3)
    code, _, err = dry_run(capsys, *arguments)
    assert code == 2
    assert all(sentence in err for sentence in sentences), err


def test_a_flag_without_effect_is_said_and_a_layout_gives_the_number_of_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [
        "--use_fsdp",
        "--fsdp_cpu_ram_efficient_loading",
        "true",
        "--parallelism_config_dp_shard_size",
        2,
    ]
    code, out, err = dry_run(capsys, *flags)
    assert code == 0 and "2 processes on this machine" in out
    assert err.count("fsdp_cpu_ram_efficient_loading='true' has no effect") == 1


def test_the_users_environment_is_checked_like_a_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_PARALLEL", "zero=3 replicate=2")
    assert "3 / 2 is not whole" in dry_run(capsys, "--nproc", 3)[2]
    assert "LOCKSTEP_PARALLEL=zero=1\n" in dry_run(capsys, "--nproc", 3, "--parallel", "zero=1")[1]


SCRIPT = """\
from lockstep import Accelerator
a = Accelerator()
o = a._options
steps = a.gradient_accumulation_steps
with open(f"rank{a.process_index}.txt", "w") as file:
    print(o.parallel, o.mixed_precision, o.micro_batch_size, steps, o.optimizer, sep="|", end="", file=file)
"""


def test_workers_get_what_the_file_says(folder: Path) -> None:
    config = {
        "zero_optimization": {"stage": 2, "legacy_stage1": True},
        "bf16": {"enabled": True},
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    }
    write("ds.json", config)
    write("train.py", SCRIPT)
    done = subprocess.run(
        [*LOCKSTEP, "launch", "--nproc", "2", "--cpu", "--deepspeed-config-file", "ds.json", "train.py"],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = "zero=2|bf16|4|2|OptimizerConfig(type='SGD', params={'lr': 0.5})"
    assert [(folder / f"rank{rank}.txt").read_text() for rank in (0, 1)] == [expected, expected]
    assert done.stderr.count("legacy_stage1=True has no effect") == 1
