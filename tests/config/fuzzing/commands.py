"""Command lines of ``lockstep``."""

from __future__ import annotations

from typing import Any

import yaml

from tests.config.fuzzing.pools import ANY, RUN, Pool, Raw, integers, words


def value_of(raw: Raw) -> str:
    """The argument that is what a YAML text says."""
    try:
        value = yaml.safe_load(raw.text)
    except (yaml.YAMLError, ValueError):
        return raw.text
    return value if isinstance(value, str) else raw.text.strip("'\"")


CONFIG_FLAGS = {
    name: RUN[name]
    for name in (
        *("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"),
        *("mixed_precision", "gradient_accumulation_steps", "parallel"),
    )
} | {"cpu": RUN["use_cpu"]}


LAUNCH_FLAGS: dict[str, Pool] = {
    **{
        name: pool
        for name, pool in RUN.items()
        if name not in ("optimizer", "scheduler", "grad_scaler", "micro_batch_size", "rdzv_conf")
    },
    "rdzv_conf": words(
        {"join_timeout=60": ANY, "'timeout=9,last_call_timeout=0'": ANY}, "x | a=1 | timeout=x"
    ),
    "nproc": integers(1, 2, 8),
    "rdzv": words(
        {"10.0.0.1:29500": ANY, "'[::1]:29500'": ANY},
        "10.0.0.1 | '10.0.0.1:0' | ':1' | 'a b:1' | x:y | 1.2.3.4:70000",
    ),
    "hosts": words(
        {"'a,b'": ANY, "'a:2,me@b:2'": ANY},
        "'a,a' | '' | ',' | '-oX=y' | 'a;id' | 'a:0' | 'a:x' | 'a:1:2' | '$(id)'",
    ),
    "slurm_option": words({"partition=gpu": ANY}, "partition | '=x' | '-x=1' | \"a=b\\nc\" | 'a b=c'"),
    "k8s": words({"jobset": ANY}, "pod | trainjob | '' | 1"),
    "k8s_option": words({"image=registry/x:1": ANY}, "image | '=x' | 'nonsense_q=1' | \"image=a\\nb\""),
    "forward_env": words({"MY_VALUE": ANY}, "'A B' | 'A=B' | '1A' | '' | 'A;B'"),
    "slurm": RUN["use_cpu"],
    "mpi": RUN["use_cpu"],
    "cpu": RUN["use_cpu"],
}
del LAUNCH_FLAGS["use_cpu"]
SWITCHES = (
    "slurm", "mpi", "cpu", "watch", "debug", "enable_cpu_affinity", "dynamo_use_fullgraph", "dynamo_use_dynamic",
    "dynamo_use_regional_compilation",
)  # fmt: skip


# a command line that is right -> what it says
LAUNCHES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--nproc 2", {"nproc": 2}),
    ("--cpu --num-processes 4", {"use_cpu": True, "num_processes": 4}),
    (
        "--nnodes 2 --nproc 4 --rdzv 10.0.0.1:29500",
        {"num_machines": 2, "nproc": 4, "main_process_ip": "10.0.0.1", "main_process_port": 29500},
    ),
    ("--nnodes 2:4 --nproc 1 --rdzv 10.0.0.1:29500", {"num_machines": 4, "min_machines": 2, "nproc": 1}),
    (
        "--nnodes 2 --node-rank 1 --num-processes 8 --main-process-ip host-0 --main-process-port 1234",
        {"num_machines": 2, "machine_rank": 1, "num_processes": 8}
        | {"main_process_ip": "host-0", "main_process_port": 1234},
    ),
    ("--hosts a:2,b:2", {"num_machines": 2, "num_processes": 4, "hosts": "a:2,b:2"}),
    ("--hosts a,me@b --nproc 8", {"num_machines": 2, "num_processes": 16, "hosts": "a,me@b"}),
    ("--mpi --hosts a,b --nproc 2", {"num_machines": 2, "num_processes": 4, "mpi": True}),
    ("--slurm --nnodes 2 --nproc 2", {"num_machines": 2, "num_processes": 4, "slurm": True}),
    (
        "--k8s jobset --k8s-option image=r/x:1 --nnodes 2 --nproc 2",
        {"num_machines": 2, "num_processes": 4, "k8s": "jobset"},
    ),
)
