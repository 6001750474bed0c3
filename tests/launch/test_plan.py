from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep.config import SETTINGS, SettingValue, worker_settings
from lockstep.errors import ConfigError
from lockstep.launch import LaunchPlan, Program, make_plan, merge
from tests.refusals import expect_refusal


def plan(flags: dict[str, object], devices: int = 0, cores: int = 8, **file: object) -> LaunchPlan:
    settings = merge(
        {name: SettingValue(value, f"flag --{name}") for name, value in flags.items()},
        {name: SettingValue(value, f"c.yaml:1: {name}") for name, value in file.items()},
        {},
    )
    return make_plan(Program("true", no_python=True), settings, device_count=devices, cores=cores)


def test_processes_of_a_machine_are_the_total_divided_by_the_machines() -> None:
    two = plan(
        {"machine_rank": 1}, num_processes=16, num_machines=2, main_process_ip="a", main_process_port=1
    )
    assert (two.nproc, two.machine_rank) == (8, 1)


def test_without_a_number_there_is_one_process_for_each_gpu_or_one() -> None:
    assert plan({}, devices=4).nproc == 4
    assert plan({"use_cpu": True}, devices=4).nproc == 1
    assert plan({"gpu_ids": "1,3"}, devices=4).nproc == 2
    assert plan({}).nproc == 1


def test_threads_share_the_cores_unless_told() -> None:
    assert plan({"nproc": 2}, cores=8).environment["OMP_NUM_THREADS"] == "4"
    assert plan({"nproc": 16}, cores=8).environment["OMP_NUM_THREADS"] == "1"
    assert plan({"nproc": 2, "num_cpu_threads_per_process": 3}).environment["OMP_NUM_THREADS"] == "3"


def test_only_what_was_said_travels_to_the_workers() -> None:
    assert set(plan({"nproc": 1}).environment) == {"OMP_NUM_THREADS"}
    said = plan({"use_cpu": True, "gpu_ids": "0,1", "gradient_accumulation_steps": 4}).environment
    assert (said["LOCKSTEP_USE_CPU"], said["LOCKSTEP_GRADIENT_ACCUMULATION_STEPS"]) == ("true", "4")
    assert said["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_a_list_of_hosts_says_how_many_machines_and_processes() -> None:
    listed = plan({"hosts": "a:4,me@b:4"})
    assert (listed.transport.backend, listed.num_machines, listed.nproc) == ("hosts", 2, 4)
    assert [host.target for host in listed.transport.hosts] == ["a", "me@b"]
    assert plan({"hosts": "a:4,b:4", "nproc": 2}).nproc == 2
    assert plan({"hosts": "a,b", "mpi": True, "nproc": 2}).transport.backend == "mpi"


def test_slurm_counts_its_nodes() -> None:
    flags = {"slurm": SettingValue(True, "flag --slurm"), "nproc": SettingValue(2, "flag --nproc")}
    environ = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "3"}
    assert merge(flags, {}, environ)["num_processes"].value == 6
    assert merge({**flags, "num_machines": SettingValue(2, "flag")}, {}, environ)["num_processes"].value == 4


def test_machines_that_may_leave_give_restarts_and_sizes_that_must_all_fit() -> None:
    elastic = plan(
        {"num_machines": 4, "min_machines": 1, "nproc": 2}, main_process_ip="a", main_process_port=1
    )
    assert (elastic.elastic, elastic.nproc, elastic.min_machines, elastic.machine_rank) == (True, 2, 1, None)
    assert elastic.fault_policy.max_restarts == 1000
    assert plan({"nproc": 1}).fault_policy.max_restarts == 0
    assert plan({"nproc": 1, "max_restarts": 3}).fault_policy.max_restarts == 3
    with pytest.raises(ConfigError, match="2 processes"):
        plan(
            {"num_machines": 4, "min_machines": 2, "nproc": 1, "parallel": "zero=3 replicate=2"},
            main_process_ip="a",
            main_process_port=1,
        )


def test_settings_of_failures_and_of_the_network_reach_the_plan() -> None:
    said = plan(
        {
            "nproc": 1,
            "hang_timeout": 9.0,
            "grace": 2.0,
            "watch": False,
            "interface": "ib0",
            "secret_file": "s",
            "rdzv_conf": {"heartbeat_timeout": 60.0},
        }
    )
    assert said.fault_policy.heartbeat_limit_s == 60.0
    assert (said.fault_policy.hang_timeout_s, said.fault_policy.grace_s, said.fault_policy.watch) == (
        9.0,
        2.0,
        False,
    )
    assert (said.interface, said.secret_file) == ("ib0", "s")
    assert (said.environment["LOCKSTEP_WATCH"], said.environment["LOCKSTEP_GRACE"]) == ("false", "2.0")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"slurm": True, "hosts": "a"}, "slurm and hosts"),
        ({"ray": True, "mpi": True}, "mpi and ray"),
        ({"hosts": "a", "hostfile": "f"}, "hosts and hostfile"),
        ({"slurm_options": {"a": "b"}}, "only with --slurm"),
        ({"forward_env": ("A",)}, "--forward-env has a meaning only with"),
        ({"hosts": "a:2,b:2", "num_machines": 3}, "--nnodes is 3, but hosts names 2"),
        ({"hosts": "a:2,b:3"}, "different numbers of slots"),
        ({"hosts": "a:2,b:3", "nproc": 3}, "has a host with 2 slots"),
        ({"hosts": "a,b"}, "num_processes is not set"),
        ({"hosts": "a,b", "nproc": 1, "machine_rank": 1}, "starts all machines"),
        ({"hostfile": "/nonexistent/hosts"}, "hostfile /nonexistent/hosts: cannot be read"),
        ({"num_machines": 2, "min_machines": 3, "nproc": 1}, "min_machines is 3"),
        ({"num_machines": 2, "nproc": 1}, "--main-process-ip is not set"),
        ({"machine_rank": 1}, "--node-rank is 1 with --nnodes 1"),
        ({"nproc": 3, "gpu_ids": "0,1"}, "names 2 GPUs"),
        (
            {"num_processes": 3, "num_machines": 2, "main_process_ip": "a", "main_process_port": 1},
            "--num-processes is 3",
        ),
    ],
)
def test_contradictions_are_refused(flags: dict[str, object], sentence: str) -> None:
    expect_refusal(ConfigError, sentence, plan, flags)


def test_commands_are_argument_vectors(tmp_path: Path) -> None:
    script = tmp_path / "a b.py"
    script.touch()
    assert Program(str(script), ("--x", "y z")).command() == (sys.executable, str(script), "--x", "y z")
    assert Program("p.m", ("1",), module=True).command() == (sys.executable, "-m", "p.m", "1")
    assert Program("./run.sh", no_python=True).command() == ("./run.sh",)


@pytest.mark.parametrize("target", ["none.py", ".", "a\0b", "x" * 5000])
def test_a_script_that_is_not_there_is_refused(target: str) -> None:
    with pytest.raises(ConfigError):
        Program(target).command()


def test_parallel_and_sections_travel_as_texts_that_workers_read_back() -> None:
    optimizer = {"type": "SGD", "params": {"lr": 0.5}}
    said = plan({"nproc": 2, "parallel": "zero=2"}, optimizer=optimizer, micro_batch_size=4).environment
    worker = worker_settings({}, said)
    assert (str(worker["parallel"].value), worker["micro_batch_size"].value) == ("zero=2", 4)
    read = worker["optimizer"].value
    assert {"type": read.type, "params": read.params} == optimizer
    assert SETTINGS["optimizer"].kind.as_data(optimizer) == optimizer
