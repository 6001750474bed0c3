"""Files as ``accelerate config`` writes them, and what ``accelerate launch`` reads: by Accelerate's own functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from accelerate.commands.config import cluster
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)

GPUS = {"type of machine": "multi-GPU", "How many GPU": "8"}
FSDP = {**GPUS, "FullySharded": "yes"}
FSDP1 = {**FSDP, "FSDP version": "1", "_no_split": "yes"}
FSDP2 = {**FSDP, "_no_split": "yes"}
LAYOUT = {**FSDP2, "parallelism config": "yes"}
MACHINES = {
    "type of machine": "multi-GPU", "How many GPU": "16", "How many different machines": "2",
    "rank of this machine": "1", "IP address": "10.0.0.1", "port you will use": "29500",
}  # fmt: skip
DEEPSPEED = {**GPUS, "use DeepSpeed?": "yes"}
ALONE = {"type of machine": "No distributed training"}
CPUS = {"type of machine": "multi-CPU", "How many processes": "4"}

# what is asked (a part of the question) -> the answer; all other answers are the defaults
ANSWERS: dict[str, dict[str, str]] = {
    "one machine": ALONE,
    "one CPU": {**ALONE, "CPU only": "yes"},
    "several CPU processes": CPUS,
    "GPUs, bf16": {**GPUS, "mixed precision": "bf16", "numa": "yes"},
    "two of the GPUs, fp16": {**GPUS, "How many GPU": "2", "by id": "0,3", "mixed precision": "fp16"},
    "two machines": {**MACHINES, "checked while running": "yes"},
    "two machines of other networks": {**MACHINES, "same local": "no", "rendezvous backend": "c10d"},
    "compiled": {**ALONE, "torch dynamo": "yes"},
    "compiled on CPUs": {
        **CPUS, "torch dynamo": "yes", "dynamo backend": "eager", "customize": "yes", "Which mode": "max-autotune",
        "fullgraph": "yes", "dynamic": "yes", "regional": "yes",
    },
    "compiled with defaults": {**ALONE, "torch dynamo": "yes", "dynamo backend": "aot_eager", "customize": "yes"},
    "FSDP 1": FSDP1,
    "FSDP 1, all answers": {
        **FSDP1, "sharding strategy": "SHARD_GRAD_OP", "_no_split": "no", "layer class names": "BertLayer,GPTJBlock",
        "offload parameters": "yes", "prefetch policy?": "BACKWARD_POST", "forward prefetch": "yes",
        "state dict type": "SHARDED_STATE_DICT", "`use_orig_params`": "no", "activation checkpointing": "yes",
    },
    "FSDP 1, by size": {
        **FSDP, "FSDP version": "1", "auto wrap policy": "SIZE_BASED_WRAP", "minimum number": "1000",
        "RAM efficient": "no", "broadcast module": "no", "mixed precision": "fp16",
    },
    "FSDP 1, replicas": {**FSDP1, "sharding strategy": "NO_SHARD"},
    "FSDP 1, two machines": {**MACHINES, **FSDP1, "How many GPU": "16", "sharding strategy": "HYBRID_SHARD"},
    "FSDP 1, two machines, ZeRO-2": {
        **MACHINES, **FSDP1, "How many GPU": "16", "sharding strategy": "HYBRID_SHARD_ZERO2",
    },
    "FSDP 2": {**FSDP2, "mixed precision": "bf16"},
    "FSDP 2, no resharding": {**FSDP2, "resharding": "no", "activation checkpointing": "yes"},
    "FSDP 2, compiled": {**FSDP2, "torch dynamo": "yes", "offload parameters": "yes"},
    "axes": {**LAYOUT, "replicate size": "2", "shard size": "2", "tensor parallelism size": "2"},
    "axes, long sequences": {**LAYOUT, "shard size": "4", "context parallelism size": "2", "strategy?": "alltoall"},
    "axes, shards alone": {**LAYOUT, "shard size": "8"},
    **{
        f"DeepSpeed, stage {stage}": {
            **DEEPSPEED, "optimization stage": stage, "accumulation steps": "3", "gradient clipping? ": "yes",
            "clipping value": "0.5", "mixed precision": "bf16",
        }
        for stage in "0123"
    },
    "DeepSpeed": DEEPSPEED,
    "DeepSpeed, alone": {**ALONE, "use DeepSpeed?": "yes"},
    "DeepSpeed, states on the CPU": {**DEEPSPEED, "offload optimizer": "cpu"},
    "DeepSpeed, all on the CPU": {
        **DEEPSPEED, "optimization stage": "3", "offload optimizer": "cpu", "offload parameters": "cpu",
        "save 16-bit": "yes", "zero.Init": "yes", "Mixture-of-Experts": "yes", "MoE layer class": "JetMoEBlock",
    },
    "DeepSpeed, all in files": {
        **DEEPSPEED, "optimization stage": "3", "Where to offload optimizer": "nvme",
        "Where to offload parameters": "nvme", "Nvme Path to offload parameters": "FOLDER",
        "Nvme Path to offload optimizer": "FOLDER",
    },
    "DeepSpeed, two machines": {**MACHINES, "use DeepSpeed?": "yes", "launcher do you": "standard"},
}  # fmt: skip


def write(path: Path, answers: Mapping[str, str]) -> None:
    """The file that ``accelerate config`` writes for these answers."""
    left = {key: value.replace("FOLDER", str(path.parent)) for key, value in answers.items()}

    def answer(question: str) -> str | None:
        key = next((key for key in left if key.lower() in question.lower()), None)
        return None if key is None else left.pop(key)

    def ask(question: str, convert: Any = None, default: Any = None, error_message: Any = None) -> Any:
        said = answer(question)
        assert said is not None or default is not None, question
        return default if said is None else convert(said) if convert else said

    def choose(question: str, options: Sequence[Any], convert: Any = None, default: int = 0) -> Any:
        said = answer(question)
        index = default if said is None else [str(option) for option in options].index(said)
        return convert(index) if convert else index

    with (
        mock.patch.object(cluster, "_ask_field", ask),
        mock.patch.object(cluster, "_ask_options", choose),
        mock.patch.object(cluster, "is_deepspeed_available", return_value=True),
    ):
        config = cluster.get_cluster_input()
    assert not left, f"not asked: {left}"
    config.to_yaml_file(path)


def launched(path: Path) -> tuple[Any, dict[str, str]]:
    """The options that ``accelerate launch`` reads from the file, and the environment that its workers get."""
    parser = launch_command_parser()
    args, _, _ = _validate_launch_command(parser.parse_args(["--config_file", str(path), "train.py"]))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""
        args.main_process_port = 0
        return args, prepare_deepspeed_cmd_env(args)[1]
    if args.use_fsdp or args.multi_gpu:
        args.main_process_port = 0
        return args, prepare_multi_gpu_env(args)
    return args, prepare_simple_launcher_cmd_env(args)[1]
