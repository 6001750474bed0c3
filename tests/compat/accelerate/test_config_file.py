from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.compat.accelerate import OTHER_KEYS, SECTIONS, from_yaml, load, write_config
from lockstep.config import IN_FILES, RunConfig, parse_yaml
from lockstep.errors import ConfigError
from lockstep.utils import PrecisionType
from tests.compat.accelerate_examples import TWO_MACHINES, TWO_PROCESSES
from tests.refusals import expect_refusal


def read(text: str) -> RunConfig:
    return from_yaml(parse_yaml(text, "run.yaml")).config


def refusal(text: str) -> str:
    return expect_refusal(ConfigError, "", read, text)


def test_the_two_process_example_is_read_as_it_is() -> None:
    loaded = from_yaml(parse_yaml(TWO_PROCESSES, "run.yaml"))
    assert loaded.warnings == []
    assert (loaded.config.num_processes, loaded.config.num_machines, loaded.config.use_cpu) == (2, 1, True)
    assert loaded.config.mixed_precision == PrecisionType.NO
    assert loaded.origins["num_processes"] == "run.yaml:10: num_processes"


def test_the_two_machine_example_is_read_as_it_is() -> None:
    config = read(TWO_MACHINES)
    assert (config.num_processes, config.num_machines, config.machine_rank) == (16, 2, 1)
    assert (config.main_process_ip, config.main_process_port) == ("192.168.20.1", 8080)
    assert (config.mixed_precision, config.rdzv_backend, config.gpu_ids) == (
        PrecisionType.FP16,
        "static",
        "all",
    )


def test_machines_that_may_leave_are_said_in_one_key_or_in_two() -> None:
    meeting = "num_processes: 4\nmain_process_ip: a\nmain_process_port: 1\n"
    for text in ('num_machines: "1:4"\n', "num_machines: 4\nmin_machines: 1\n"):
        config = read(text + meeting)
        assert (config.num_machines, config.min_machines, config.machine_rank) == (4, 1, None)
    assert "num_machines is 1:4 but min_machines is 2" in refusal(
        'num_machines: "1:4"\nmin_machines: 2\n' + meeting
    )
    assert "run.yaml:1: num_machines: '4:1' is not" in refusal('num_machines: "4:1"\n' + meeting)


def test_settings_of_other_ways_to_launch_are_read() -> None:
    config = read(
        "slurm: true\nslurm_options: {partition: gpu, time: 90}\ngrace: 5\nwatch: false\nforward_env: [A]\n"
    )
    assert (config.slurm, config.slurm_options) == (True, {"partition": "gpu", "time": "90"})
    assert (config.grace, config.watch, config.forward_env) == (5.0, False, ("A",))
    config = read("hosts: [a, 'me@b:2']\nk8s_options: null\n")
    assert (config.hosts, config.k8s_options) == ("a,me@b:2", None)
    for text, message in (
        ("hosts: '-oProxyCommand=x'\n", "run.yaml:1: hosts: '-oProxyCommand=x' is not a host name"),
        ("grace: -1\n", "run.yaml:1: grace: -1 is not a number of seconds"),
        ("k8s: pod\n", "run.yaml:1: k8s: 'pod' is not one of"),
        (
            "slurm_options: {'a b': 1}\nslurm: true\n",
            "run.yaml:1: slurm_options: 'a b' is not the name of an option",
        ),
        ("interface: '../x'\n", "run.yaml:1: interface: '../x' is not the name of a network interface"),
        ("ray: true\nmpi: true\n", "run.yaml:2: mpi and ray are two ways to launch"),
    ):
        assert message in refusal(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parallel:\n  zero: 3\n  tp: x\n", "run.yaml:3: parallel.tp=x is not an integer"),
        ("parallel:\n  zero: 3\n  offlod: true\n", "run.yaml:3: parallel.offlod is an unknown word"),
        (
            "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_offload_params: false\n"
            "  fsdp_sharding_strategy: FULL\n",
            "run.yaml:5: fsdp_config.fsdp_sharding_strategy='FULL' is not one of",
        ),
        (
            "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  offload_optimizer_device: nvme\n"
            "  offload_optimizer_nvme_path: nvme\n",
            "(run.yaml:5: deepspeed_config.offload_optimizer_nvme_path) is not a folder",
        ),
    ],
)
def test_a_key_inside_of_a_section_is_named_with_its_own_line(text: str, message: str) -> None:
    assert message in refusal(text)


def test_sections_of_other_libraries_choose_the_way_to_launch(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=2\nb slots=2\n")
    config = read(f"num_processes: 4\nmpirun_config: {{mpirun_hostfile: {file}, mpirun_ccl: '1'}}\n")
    assert (config.mpi, config.hostfile) == (True, str(file))
    section = f"deepspeed_hostfile: {file}, zero_stage: 2"
    config = read(f"num_processes: 4\ndeepspeed_config: {{deepspeed_multinode_launcher: pdsh, {section}}}\n")
    assert (config.hostfile, config.parallel) == (str(file), "zero=2")
    assert "list those hosts in the hostfile" in refusal(
        f"deepspeed_config: {{deepspeed_exclusion_filter: 'a:0', deepspeed_hostfile: {file}}}\n"
    )
    assert read("deepspeed_config: {deepspeed_multinode_launcher: slurm}\n").slurm is True


@pytest.mark.parametrize("prefix", ["", "fp8_"])
def test_a_section_of_fp8_is_that_of_torchao(prefix: str) -> None:
    keys = {"backend": "AO", "enable_fsdp_float8_all_gather": "false", "pad_inner_dim": "false"}
    section = "fp8_config: {" + ", ".join(f"{prefix}{key}: {value}" for key, value in keys.items()) + "}\n"
    config = read("mixed_precision: fp8\n" + section)
    assert (config.mixed_precision, config.fp8_pad_inner_dim) == ("fp8", False)
    for written, said in (
        ("backend: TE", "asks for fp8 by another package than torchao"),
        ("backend: AO, margin: 2", "margin=2 asks for a setting of TransformerEngine"),
        ("backend: AO, opt_level: O1", "asks for a setting of MS-AMP"),
        ("backend: AO, pad_inner: true", "Did you mean 'pad_inner_dim'"),
    ):
        assert said in refusal(f"fp8_config: {{{written}}}\n")


def test_every_key_of_accelerate_is_known() -> None:
    sections = [
        "downcast_bf16",
        "deepspeed_config",
        "fsdp_config",
        "parallelism_config",
        "fp8_config",
        "dynamo_config",
        "mpirun_config",
        "megatron_lm_config",
        "tpu_env",
        "tpu_name",
        "tpu_zone",
        "tpu_use_cluster",
        "tpu_use_sudo",
        "same_network",
        "main_training_function",
        "enable_cpu_affinity",
    ]
    assert set(sections) <= {*OTHER_KEYS, *SECTIONS, *IN_FILES}
    for key in sections:
        assert read(TWO_PROCESSES.replace(f"{key}:", f"# {key}:") + f"{key}: null\n").num_processes == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_processes: 2", "num_processes: abc", "run.yaml:10: num_processes: 'abc' is not an integer"),
        ("num_processes: 2", "num_processes: true", "run.yaml:10: num_processes: True is not an integer"),
        (
            "num_processes: 2",
            "num_proceses: 2",
            "run.yaml:10: 'num_proceses'",
        ),
        (
            "num_processes: 2",
            "num_processes: 2\nnum_processes: 3",
            "run.yaml:11: num_processes is given twice, ",
        ),
        (
            "num_machines: 1",
            "num_machines: 2",
            "run.yaml:9: num_machines is 2",
        ),
        ("machine_rank: 0", "machine_rank: 1", "run.yaml:6: machine_rank is 1 with num_machines 1"),
        ("MULTI_CPU", "MULTI_CPI", "run.yaml:3: distributed_type: 'MULTI_CPI' is not one of"),
        ("MULTI_CPU", "MEGATRON_LM", "run.yaml:3: distributed_type: MEGATRON_LM is not available"),
        ("MULTI_CPU", "MULTI_GPU", "run.yaml:16: use_cpu is true"),
        (
            "LOCAL_MACHINE",
            "AMAZON_SAGEMAKER",
            "run.yaml:1: compute_environment: AMAZON_SAGEMAKER is not available",
        ),
        ("mixed_precision: 'no'", "mixed_precision: bf61", "run.yaml:8: mixed_precision: bf61 is not one of"),
        (
            "debug: false",
            "fsdp_config: {fsdp_version: 2}",
            "run.yaml:2: fsdp_config asks for sharding (FSDP)",
        ),
        ("debug: false", "debug: perhaps", "run.yaml:2: debug: 'perhaps'"),
        ("debug: false", "debug: &a [*a]", "run.yaml:2: not valid YAML: aliases"),
        ("debug: false", "debug: [", "run.yaml:4: not valid YAML"),
        ("rdzv_backend: static", "rdzv_backend: statc", "Did you mean 'static'?"),
    ],
)
def test_bad_files_give_one_message_with_file_line_and_key(old: str, new: str, message: str) -> None:
    said = refusal(TWO_PROCESSES.replace(old, new))
    assert message in said
    assert "\n" not in said


def test_sections_that_are_switched_off_are_tolerated() -> None:
    assert read(TWO_PROCESSES + "fsdp_config: {}\ndeepspeed_config:\ndynamo_config: {dynamo_backend: 'NO'}\n")


def test_distributed_type_no_means_one_process() -> None:
    loaded = from_yaml(parse_yaml("distributed_type: 'NO'\n", "run.yaml"))
    assert (loaded.config.num_processes, loaded.origins["num_processes"]) == (
        1,
        "run.yaml:1: distributed_type",
    )


@pytest.mark.parametrize("kind", ["'NO'", "NO"])
def test_sections_that_distributed_type_no_switches_off_are_said_to_have_no_effect(kind: str) -> None:
    text = f"distributed_type: {kind}\nnum_processes: 1\ndeepspeed_config: {{deepspeed_config_file: none.json}}\n"
    loaded = from_yaml(parse_yaml(text, "run.yaml"))
    assert loaded.warnings == [
        "run.yaml:3: deepspeed_config has no effect: distributed_type is NO. Set DEEPSPEED to shard."
    ]
    assert loaded.config.given() == read("distributed_type: 'NO'\nnum_processes: 1\n").given()


def test_a_switch_without_effect_is_said_by_name() -> None:
    loaded = from_yaml(
        parse_yaml(TWO_PROCESSES.replace("downcast_bf16: 'no'", "downcast_bf16: 'yes'"), "run.yaml")
    )
    assert loaded.warnings == ["run.yaml:4: downcast_bf16 has no effect: it concerns TPUs only."]


def test_a_written_file_reads_back_the_same(tmp_path: Path) -> None:
    path = tmp_path / "new" / "c.yaml"
    write_config(path, {"num_processes": 4, "mixed_precision": "no", "use_cpu": True})
    config = load(path).config
    assert (config.num_processes, config.mixed_precision, config.use_cpu) == (4, PrecisionType.NO, True)
