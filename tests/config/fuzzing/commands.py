"""Command lines of ``lockstep``."""

from __future__ import annotations

import random
from typing import Any

import yaml

from tests.config.fuzzing.files import (
    damaged_json,
    damaged_yaml,
    deepspeed_json,
    misspelt,
    our_yaml,
    some_word,
)
from tests.config.fuzzing.pools import ANY, RUN, Input, Pool, Raw, chance, integers, split, words


def value_of(raw: Raw) -> str:
    """The argument that is what a YAML text says."""
    try:
        value = yaml.safe_load(raw.text)
    except (yaml.YAMLError, ValueError):
        return raw.text
    return value if isinstance(value, str) else raw.text.strip("'\"")


def flags(
    source: random.Random, given: Input, pools: dict[str, Pool], most: int, switches: tuple[str, ...]
) -> list[str]:
    """Some flags with values, of which few are wrong."""
    names = source.sample(list(pools), source.randint(0, min(most, len(pools))))
    faulty = source.choice(names) if names and chance(source, 0.4) else None
    arguments = []
    for name in names:
        flag = "--" + name.replace("_", "-")
        if name in switches:
            if name == faulty:
                continue
            given.means[name] = True
            arguments.append(flag)
            continue
        raw = pools[name].draw(source, name == faulty)
        given.settings(name, raw)
        text = value_of(raw)
        arguments += [flag, text] if chance(source, 0.7) else [f"{flag}={text}"]
    if chance(source, 0.08):
        given.wrong = True
        flag = "--" + (
            misspelt(source, source.choice(list(pools))) if chance(source, 0.5) else some_word(source)
        )
        arguments.insert(source.choice((0, len(arguments))), f"{flag.replace('_', '-')}=1")
    return arguments


CONFIG_FLAGS = {
    name: RUN[name]
    for name in (
        *("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"),
        *("mixed_precision", "gradient_accumulation_steps", "parallel"),
    )
} | {"cpu": RUN["use_cpu"]}


def config_command(source: random.Random) -> Input:
    given = Input("lockstep config")
    given.argv = ["config", "--yes", "--force", "--config-file", "out.yaml"]
    given.argv += flags(source, given, CONFIG_FLAGS, 5, ("cpu",))
    if chance(source, 0.1):
        given.argv[4] = source.choice(
            ("", "no/such/folder/x.yaml", ".", "nul\0", "x" * 300, "/proc/x", "sh\x1b[31m")
        )
        given.means.clear()
    return given


def convert_command(source: random.Random) -> Input:
    make = source.choice((our_yaml, damaged_yaml, deepspeed_json, damaged_json))
    file = make(source)
    given = Input("lockstep config convert", file.content, wrong=file.wrong)
    name = "in.json" if make in (deepspeed_json, damaged_json) else "in.yaml"
    given.argv = ["config", "convert", name]
    if chance(source, 0.5):
        given.argv += ["--ranks", source.choice(("1", "2", "4", "8"))]
    elif chance(source, 0.2):
        given.argv += ["--ranks", source.choice(("0", "-1", "x", "1.5", "9" * 400))]
        given.wrong = True
    if chance(source, 0.3):
        given.argv += ["-o", source.choice(("out.yaml", ".", "no/such/out.yaml")), "--force"]
    if chance(source, 0.05):
        given.argv[2] = source.choice(("missing.yaml", ".", "", "nul\0", "-", "\x1b[31m", "x" * 300))
        given.wrong = True
    return given


SCHEDULE_FLAGS = {
    "ranks": integers(2, 4, 8, more="1000000000"),
    "micro_batches": integers(8, 16, 24),
    "stages_per_rank": integers(1, 2, low=0),
    "times": words(
        {"'1,2'": ANY, "'1,1,1'": ANY, "'0.5,1.5'": ANY},
        "1 | '1,x' | '1,2,3,4' | '0,1' | '-1,2' | 'nan,1' | 'inf,1' | '1,1e9' | ',' | '' | 1,,2",
    ),
}


def schedule_command(source: random.Random) -> Input:
    given = Input("lockstep schedule")
    name = source.choice(("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"))
    if chance(source, 0.1):
        name = source.choice(("pipedream", "", "1F1B", "\x1b[31m", "x" * 5000, "٣"))
        given.wrong = True
    given.means["name"] = name
    given.argv = ["schedule", *flags(source, given, SCHEDULE_FLAGS, 3, ()), name]
    if chance(source, 0.8):
        given.argv.append("--json")
    if chance(source, 0.05):
        given.argv += ["-o", source.choice(("out.svg", "out.png", "no/such/x.svg", "nul\0.svg", ".svg"))]
    return given


NO_CHECKPOINTS = split(
    "missing | folder | folder/file | nul\0 | - | -- | \x1b[31m | a\nb | . | s3:// | s3:///x | nope://bucket/x | file://x",
    "~nobody_q/x | folder/file/below | é",
    "",
    "x" * 300,
)
CHECKPOINT_OPTIONS: dict[str, tuple[str, ...]] = {
    "--model": split("0 | 1 | -1 | x", "9" * 400),
    "--dtype": split("bf16 | fp8", ""),
    "--max-shard-size": split("1GB | -1 | x | 0 | nan | 1e999GB | ٣GB | 1.5.5GB", " GB", "9" * 5000 + "GB"),
    "--skip": split("x | ../x", ""),
    **dict.fromkeys(("--all", "--json", "--tensors", "--force", "--burn"), ()),
}


def checkpoint_command(source: random.Random) -> Input:
    """On what is no checkpoint; nothing of it may succeed."""
    given = Input("lockstep checkpoint", wrong=True)
    given.content = bytes(source.randrange(256) for _ in range(source.randint(0, 200)))
    verb = source.choice(("verify", "show", "merge", "convert", "import-pickle", "burn", ""))
    given.argv = ["checkpoint", verb, source.choice(NO_CHECKPOINTS)]
    if verb in ("merge", "convert", "import-pickle") and chance(source, 0.9):
        given.argv.append(source.choice(("out", "out.safetensors", "folder/file/x", "nul\0", "")))
    for name in source.sample(list(CHECKPOINT_OPTIONS), source.randint(0, 2)):
        values = CHECKPOINT_OPTIONS[name]
        given.argv += [name, source.choice(values)] if values else [name]
    return given


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
    "k8s": words({"jobset": ANY}, "trainjob | pod | '' | 1"),
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

TOPOLOGY = set(
    split(
        "--nnodes | --num-machines | --num-processes | --nproc | --rdzv | --main-process-ip | --node-rank",
        "--main-process-port | --machine-rank | --hosts | --slurm | --mpi | --k8s | --gpu-ids",
    )
)

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


def launch_command(source: random.Random) -> Input:
    given = Input("lockstep launch")
    start, means = source.choice(LAUNCHES) if chance(source, 0.8) else ("", {})
    said = {word.split("=")[0] for word in start.split()} | {"--" + name.replace("_", "-") for name in means}
    taken = said | (TOPOLOGY if said and chance(source, 0.8) else set())
    pools = {name: pool for name, pool in LAUNCH_FLAGS.items() if "--" + name.replace("_", "-") not in taken}
    given.argv = ["launch", "--dry-run", *start.split(), *flags(source, given, pools, 4, SWITCHES)]
    for name, meaning in means.items():
        given.means.setdefault(name, meaning)
    if chance(source, 0.2):
        file = source.choice((our_yaml, damaged_yaml))(source)
        given.content, given.wrong = file.content, given.wrong or file.wrong
        given.argv[2:2] = ["--config-file", "in.yaml"]
        given.means.clear()
    script = (
        "train.py" if chance(source, 0.9) else source.choice(("missing.py", "", "nul\0", ".", "\x1b[31m"))
    )
    # a script for pods is looked for in their image
    given.wrong |= script != "train.py" and not (script == "missing.py" and "--k8s" in given.argv)
    given.argv += [script, *source.sample(["--lr", "0.1", "a b", "$(id)", "--nproc=9"], source.randint(0, 2))]
    return given
