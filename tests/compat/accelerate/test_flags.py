"""Every option of ``accelerate launch`` works in both spellings, or is refused by its name."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Action
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import TorchDynamoPlugin as TheirPlugin

from cli.calling import call, check_refused
from lockstep import Accelerator
from lockstep.compat.accelerate import REFUSED
from tests.command import LOCKSTEP

VERSION = "1.15"
"""Of Accelerate, whose options these are; a switch has no value, and ``=`` parts several that work."""


def words(text: str) -> list[str]:
    return text.split()


WORKS = words("""
    config_file=FILE quiet q cpu multi_gpu mixed_precision=no=fp16=bf16 num_processes=2 num_machines=1
    num_cpu_threads_per_process=1 enable_cpu_affinity dynamo_backend=no=eager=inductor=INDUCTOR
    dynamo_mode=default=reduce-overhead=max-autotune dynamo_use_fullgraph dynamo_use_dynamic
    dynamo_use_regional_compilation use_deepspeed use_fsdp use_parallelism_config gpu_ids=all=0,1 same_network
    machine_rank=0 main_process_ip=10.0.0.1 main_process_port=0=29500 t=0=1=2=3 tee=0=3=0:3,1:1 log_dir=FOLDER
    role=default=trainer rdzv_backend=static=c10d rdzv_conf=timeout=join_timeout:60 max_restarts=0=3
    monitor_interval=0.1=5 m module no_python no_tpu_cluster deepspeed_config_file=JSON zero_stage=0=3
    offload_optimizer_device=none=cpu offload_param_device=none offload_optimizer_nvme_path=none
    offload_param_nvme_path=none gradient_accumulation_steps=2 gradient_clipping=1.0 zero3_init_flag=false=true
    zero3_save_16bit_model=true=false deepspeed_hostfile=none deepspeed_exclusion_filter=none
    deepspeed_inclusion_filter=none deepspeed_multinode_launcher=standard=none deepspeed_moe_layer_cls_names=Block
    fsdp_version=1=2 fsdp_offload_params=false=true fsdp_min_num_params=100000000=1000
    fsdp_sharding_strategy=FULL_SHARD=SHARD_GRAD_OP=NO_SHARD=HYBRID_SHARD=HYBRID_SHARD_ZERO2=1
    fsdp_reshard_after_forward=true=false=FULL_SHARD fsdp_transformer_layer_cls_to_wrap=Block,Head
    fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP=SIZE_BASED_WRAP=NO_WRAP
    fsdp_backward_prefetch=BACKWARD_PRE=NO_PREFETCH fsdp_state_dict_type=FULL_STATE_DICT=SHARDED_STATE_DICT
    fsdp_forward_prefetch=false=true fsdp_use_orig_params=true fsdp_cpu_ram_efficient_loading=true=false
    fsdp_sync_module_states=true=false fsdp_activation_checkpointing=true fsdp_activation_checkpointing_offload=false
    debug mpirun_hostfile=none parallelism_config_dp_replicate_size=1 parallelism_config_dp_shard_size=1=2
    parallelism_config_tp_size=1=2 parallelism_config_cp_size=1=2 parallelism_config_cp_backend=torch
    parallelism_config_cp_comm_strategy=allgather parallelism_config_sp_size=1=2
    parallelism_config_sp_backend=deepspeed parallelism_config_sp_seq_length=64
    parallelism_config_sp_seq_length_is_variable=true parallelism_config_sp_attn_implementation=sdpa
    megatron_lm_tp_degree=1 fp8_backend=AO fp8_margin=0 fp8_format=HYBRID main_training_function=main
    fp8_enable_fsdp_float8_all_gather=true=false fp8_pad_inner_dim=true=false
""")
IS_REFUSED = words("""
    tpu tpu_cluster tpu_use_sudo vm=name env=A=1 main_training_function=train downcast_bf16 use_megatron_lm
    aws_access_key_id=x aws_secret_access_key=x mixed_precision=fp4 fp8_backend=te fp8_use_autocast_during_eval
    fp8_margin=1 fp8_interval=2 fp8_format=E4M3 fp8_amax_history_len=1 fp8_amax_compute_algo=max
    fp8_override_linear_precision=true,false,false fp8_opt_level=O1 fp8_enable_fsdp_float8_all_gather=maybe
    fp8_pad_inner_dim=maybe megatron_lm_tp_degree=2 megatron_lm_pp_degree=2 megatron_lm_gradient_clipping=2.0
    megatron_lm_use_custom_fsdp=true megatron_lm_no_load_optim=true megatron_lm_eod_mask_loss=true
    megatron_lm_overlap_cpu_optimizer_d2h_h2d=true megatron_lm_no_save_optim=true
    megatron_lm_optimizer_cpu_offload=true megatron_lm_use_precision_aware_optimizer=true
    megatron_lm_decoder_last_pipeline_num_layers=2 megatron_lm_num_micro_batches=2
    megatron_lm_sequence_parallelism=true megatron_lm_recompute_activations=true
    megatron_lm_use_distributed_optimizer=true megatron_lm_recompute_granularity=full
    megatron_lm_recompute_method=block megatron_lm_recompute_num_layers=1 megatron_lm_attention_backend=true
    megatron_lm_expert_model_parallel_size=2 megatron_lm_context_parallel_size=2 megatron_lm_attention_dropout=0.1
    megatron_lm_hidden_dropout=0.1 megatron_lm_attention_softmax_in_fp32=true
    megatron_lm_expert_tensor_parallel_size=2 megatron_lm_calculate_per_token_loss=true
    megatron_lm_use_rotary_position_embeddings=true rdzv_backend=etcd rdzv_conf=is_host=1 parallelism_config_cp_size=x
    dynamo_backend=indctor
""")
# what must stand beside an option for it to mean something
BESIDE = {
    "fsdp_activation_checkpointing_offload": ["--use_fsdp"],
    "parallelism_config_dp_shard_size": ["--num_processes", "2"],
    "parallelism_config_tp_size": ["--num_processes", "2"],
    "parallelism_config_cp_size": ["--num_processes", "2"],
    "parallelism_config_sp_size": ["--num_processes", "2"],
}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.delenv("LOCKSTEP_CONFIG_FILE", raising=False)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.touch()
    (tmp_path / "FILE").write_text("num_machines: 1\n")
    (tmp_path / "JSON").write_text('{"zero_optimization": {"stage": 1}}')
    return path


def lines(option: str, folder: Path) -> list[list[str]]:
    """The command lines that an entry stands for: each spelling with each value."""
    name, *values = option.split("=")
    if name in ("env", "rdzv_conf", "mpirun_hostfile", "log_dir", "config_file", "deepspeed_config_file"):
        text = {"rdzv_conf": "timeout=60", "env": "A=1", "log_dir": "FOLDER"}.get(name, values[0])
        text = "is_host=1" if values[0] == "is_host" else text
        values = [str(folder / text) if (folder / text).exists() or text == "FOLDER" else text]
    flags = [f"-{name}"] if len(name) == 1 else [f"--{name}", f"--{name.replace('_', '-')}"]
    beside = BESIDE.get(name, [])
    if not values:
        return [[*beside, flag] for flag in flags]
    return [[*beside, flag, value] for flag in flags for value in values]


def test_the_lists_have_every_option_of_the_installed_accelerate() -> None:
    actions: list[Action] = launch_command_parser()._actions
    if not accelerate.__version__.startswith(VERSION):
        pytest.skip(f"Accelerate {accelerate.__version__} is installed; the list is that of {VERSION}")
    theirs = {word.lstrip("-").replace("-", "_") for action in actions for word in action.option_strings}
    ours = {option.partition("=")[0] for option in (*WORKS, *IS_REFUSED)}
    assert theirs - {"h", "help"} == ours - {"INDUCTOR"}
    defaults = {action.dest: action.default for action in actions}
    for name, (_, _, default) in REFUSED.items():  # the value that asks for nothing is Accelerate's default
        theirs_is = defaults.get(name, False)
        text = ",".join(map(str, theirs_is)) if isinstance(theirs_is, tuple) else str(theirs_is)
        assert text.lower() in (default, "none", "false"), name


def test_every_option_that_means_something_works_in_both_spellings(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = 0
    for option in WORKS:
        for line in lines(option, script.parent):
            module = ["tests"] if line[-1] in ("-m", "--module") else [script]
            code, out, err = call(capsys, "launch", *line, "--dry-run", *module)
            assert code == 0, (line, err)
            assert " processes on this machine, each:" in out, line
            count += 1
    assert count > 200


def test_every_other_option_is_refused_by_its_name(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in IS_REFUSED:
        for line in lines(option, script.parent):
            name = option.partition("=")[0].replace("_", "-")
            code, out, err = call(capsys, "launch", *line, "--dry-run", script)
            assert (code, out, err.count("lockstep: error: ")) == (2, "", 1), line
            assert name in err.replace("_", "-"), (line, err)


def test_the_value_of_a_key_is_not_shown(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(capsys, ["launch", "--aws_secret_access_key", "hunter2", str(script)], "SageMaker")
    assert "hunter2" not in call(capsys, "launch", "--aws-secret-access-key=hunter2", script)[2]


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("--tee SCRIPT --lr 1", ["--lr", "1"]),
        ("-t 3 SCRIPT 3", ["3"]),
        ("--tee=3 SCRIPT --tee", ["--tee"]),
        ("--tee 0:3,1:1 --nproc 2 SCRIPT -t 3", ["-t", "3"]),
        ("-t 0 -t 3 SCRIPT", []),
        ("--role t --tee 2 SCRIPT", []),
    ],
)
def test_tee_is_a_switch_or_has_a_value(
    line: str, arguments: list[str], script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--log_dir", str(script.parent / "logs"), *line.replace("SCRIPT", str(script)).split()]
    code, out, err = call(capsys, "launch", "--dry-run", *words)
    assert code == 0, err
    command = out.splitlines()[1].split()
    assert command == [sys.executable, str(script), *arguments]


def test_a_value_of_tee_that_is_none_is_refused(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(capsys, ["launch", "--tee=9", str(script)], "--tee '9'")


REPORT = """
import json, os, sys
role = {name: os.environ[name] for name in ("ROLE_NAME", "RANK")}
sys.stdout.write(json.dumps(role) + "\\n")
"""


def test_workers_find_their_role_and_tee_shows_what_goes_to_files(script: Path) -> None:
    script.write_text(REPORT)
    logs = script.parent / "logs"
    options = [
        "--nproc",
        "2",
        "--cpu",
        "--role",
        "trainer",
        "--monitor_interval",
        "0.3",
        "-t",
        "3",
        "--log_dir",
    ]
    command = [*LOCKSTEP, "launch", *options, str(logs), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = [json.loads((logs / f"rank-{rank}.out").read_text()) for rank in (0, 1)]
    assert found == [{"ROLE_NAME": "trainer", "RANK": str(rank)} for rank in (0, 1)]
    assert done.stdout.count('"ROLE_NAME": "trainer"') == 2


@pytest.mark.parametrize(
    "said",
    [
        {"BACKEND": "EAGER"},
        {"BACKEND": "INDUCTOR", "MODE": "max-autotune", "USE_FULLGRAPH": "True", "USE_DYNAMIC": "True"},
        {"BACKEND": "AOT_EAGER", "MODE": "default", "USE_FULLGRAPH": "False", "USE_DYNAMIC": "False"},
        {"BACKEND": "NO", "MODE": "default", "USE_REGIONAL_COMPILATION": "True"},
    ],
)
@pytest.mark.parametrize("prefix", ["ACCELERATE_DYNAMO_", "LOCKSTEP_DYNAMO_"])
def test_models_are_compiled_as_the_variables_say(
    prefix: str, said: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: calls.append(options) or model)
    for name, value in said.items():
        monkeypatch.setenv(prefix + name, value)
    Accelerator(cpu=True).prepare(torch.nn.Linear(2, 2))
    for name, value in said.items():
        monkeypatch.setenv("ACCELERATE_DYNAMO_" + name, value)
    theirs = TheirPlugin().to_kwargs()
    usual = {"mode": "default", "fullgraph": False, "disable": False, "options": None, "dynamic": None}
    wanted = {**usual, **theirs}
    if wanted.pop("backend", "no") == "no":
        assert calls == []
        return
    backend = calls[0].pop("backend")
    wanted.pop("use_regional_compilation", None)
    assert (backend, {**usual, **calls[0]}) == (said["BACKEND"].lower(), wanted)


def test_blocks_are_compiled_one_by_one_where_a_variable_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: compiled.append(type(self).__name__)
    )
    monkeypatch.setenv("LOCKSTEP_DYNAMO_BACKEND", "eager")
    monkeypatch.setenv("LOCKSTEP_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()) for _ in range(3)]
    Accelerator(cpu=True).prepare(torch.nn.Sequential(torch.nn.ModuleList(blocks), torch.nn.Linear(4, 1)))
    assert compiled.count("Sequential") == 3
