"""What the tables refuse, or call without effect, does not exist; and what they point to does."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

import lockstep
import lockstep.nn
import lockstep.utils
from lockstep import Accelerator
from lockstep.cli import COMMANDS
from lockstep.compat import NoEffect, Refused, deepspeed, fsdp
from lockstep.compat.accelerate import LAYOUT_KEYS, MPI_KEYS, OTHER_KEYS, REFUSED
from lockstep.compat.deepspeed import DEEPSPEED_KEYS, from_deepspeed
from lockstep.compat.fsdp import POLICY_KEYS
from lockstep.config import NOT_OPTIONS, OF_WORKERS, TOPICS, parallel_fields, parallel_of
from lockstep.errors import ConfigError
from lockstep.utils import Parallel

WORDS = {item.name for item in fields(Parallel)}
FLAGS = {word for settings in TOPICS.values() for one in settings for word in one.flags.split()}
VARIABLES = {name for one in OF_WORKERS.values() for name in one.variables}
TABLES: dict[str, Any] = {
    "DeepSpeed": deepspeed.KEYS,
    "FSDP": fsdp.KEYS,
    "mixed_precision_policy": POLICY_KEYS,
    "deepspeed_config": DEEPSPEED_KEYS,
    "parallelism_config": LAYOUT_KEYS,
    "mpirun_config": MPI_KEYS,
}

# a feature as messages speak of it -> whether it has come to exist, and the word that leads there
FEATURES: dict[str, tuple[bool, str]] = {
    r"tensor parallel": ("tp" in WORDS, "tp="),
    r"pipeline(?!_)": ("pp" in WORDS, "pp="),
    r"expert parallel": ("ep" in WORDS, "ep="),
    r"sequence parallel|context parallel|ulysses": ("cp_method" in WORDS, "cp="),
    r"elastic|number of machines": ("--nnodes" in FLAGS, "--nnodes"),
    r"compilation": ("dynamo_backend" in OF_WORKERS, "dynamo_backend"),
    r"layout of ranks": ("replicate" in WORDS, "replicate="),
    r"meta device": (hasattr(Accelerator, "prepare_model"), "init_weights"),
    r"offload": ("offload" in WORDS, "offload"),
    r"activation checkpoint|recomput": ("activation" in WORDS, "activation"),
    r"checkpointing": ("activation" in WORDS, "activation"),
    r"quantised gradients|quantised weights": ("quantized_gradients" in WORDS, "zero"),
    r"fp16|float16": ("fp16" in {str(word) for word in lockstep.utils.PrecisionType}, "fp16"),
    r"replica": ("replicate" in WORDS, "replicate"),
    r"mics": ("replicate" in WORDS, "replicate=|hpz="),
    r"megatron": ("tp" in WORDS, "parallel"),
    r"fp8|ms-amp": (
        "fp8" in {str(word) for word in lockstep.utils.PrecisionType},
        "mixed.precision|AORecipe",
    ),
    r"apex": ("bf16" in {str(word) for word in lockstep.utils.PrecisionType}, "bf16|fp16"),
    r"tuning": ("tune" in COMMANDS, "lockstep tune"),
    r"hybrid engine": (hasattr(Accelerator, "summon_full_params"), "summon_full_params"),
    r"bitsandbytes|weights of 8 bits": (True, "BitsAndBytesConfig"),
}
# these are something else, which does not exist
OTHERWISE = {
    "zeropp_loco_param", "weight_quantization", "quantize_training", "fp16_master_weights_and_grads",
    "compression_training",
}  # fmt: skip


def refusals() -> Iterator[tuple[str, str, str]]:
    """(where, the whole message's feature, what it says to do) of everything that is refused."""
    for name, table in TABLES.items():
        for key, rule in rules(table, name):
            if isinstance(rule, Refused):
                yield key, rule.what, rule.instead
    for key, rule in OTHER_KEYS.items():
        if hasattr(rule, "what"):
            yield key, rule.what, rule.instead
    for name, (what, instead) in NOT_OPTIONS.items():
        yield name, what, instead
    for name, (what, instead, _) in REFUSED.items():
        yield name, what, instead


def rules(table: Any, path: str) -> Iterator[tuple[str, Any]]:
    for key, rule in table.items():
        if isinstance(rule, dict):
            yield from rules(rule, f"{path}.{key}")
        else:
            yield f"{path}.{key}", rule


def texts() -> Iterator[tuple[str, str]]:
    """Everything that the tables say to people."""
    for key, what, instead in refusals():
        yield key, f"{what} {instead}"
    for name, table in TABLES.items():
        for key, rule in rules(table, name):
            if isinstance(rule, NoEffect):
                yield key, rule.why
    for key, rule in OTHER_KEYS.items():
        if hasattr(rule, "why"):
            yield key, rule.why


def test_what_is_refused_has_not_come_to_exist_or_the_message_says_how_to_get_it() -> None:
    stale = []
    for key, what, instead in refusals():
        if key.rsplit(".", 1)[-1] in OTHERWISE:
            continue
        for pattern, (exists, word) in FEATURES.items():
            if (
                exists
                and re.search(pattern, what, re.IGNORECASE)
                and not re.search(word, f"{what} {instead}")
            ):
                stale.append(f"{key}: {what}. {instead}")
    assert stale == []


def test_every_name_that_a_message_points_to_exists() -> None:
    count, missing = 0, []
    arguments = set(inspect.signature(Accelerator).parameters) | WORDS
    for key, text in texts():
        found: list[tuple[str, bool]] = [
            (f"accelerator.{name}", hasattr(Accelerator, name))
            for name in re.findall(r"accelerator\.(\w+)", text)
        ]
        found += [
            (f"lockstep.{first}", hasattr(lockstep, first))
            for first in re.findall(r"lockstep\.([A-Z]\w+)", text)
        ]
        found += [(name, hasattr(lockstep.nn, name)) for name in re.findall(r"lockstep\.nn\.(\w+)", text)]
        found += [(name, name in arguments) for name in re.findall(r"Accelerator\((\w+)=", text)]
        found += [
            (f"{kind}({name})", name in inspect.signature(getattr(lockstep.utils, kind)).parameters)
            for kind, name in re.findall(r"([A-Z]\w+)\((\w+)=", text)
            if kind != "Accelerator"
        ]
        found += [
            (name, name in inspect.signature(Accelerator.prepare_model).parameters)
            for name in re.findall(r"prepare_model\(model, (\w+)=", text)
        ]
        found += [(flag, flag in {*FLAGS, "--dry-run"}) for flag in re.findall(r"--[a-z-]+", text)]
        found += [(name, name in VARIABLES) for name in re.findall(r"LOCKSTEP_[A-Z_]+", text)]
        for line in re.findall(r"parallel='([^']*)'", text):
            Parallel.parse(re.sub(r"=[KNM]\b", "=2", line))
            found.append((line, True))
        count += len(found)
        missing += [(key, name) for name, there in found if not there]
    assert count > 15
    assert missing == []


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"tensor_parallel": {"autotp_size": 2}}, "tp=2"),
        ({"tensor_parallel": {"autotp_size": 1}}, "auto"),
        ({"tensor_parallel": {"autotp_size": 0, "tp_overlap_comm": False}}, "auto"),
        ({"tensor_parallel": {"tp": {"tp_size": 4, "tp_grain_size": 1}}}, "tp=4"),
        ({"tensor_parallel": {"autotp_size": 4, "tensor_parallel": {"tp_size": 4}}}, "tp=4"),
        ({"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}}, "zero=1 tp=2"),
        ({"sequence_parallel_size": 2}, "cp=2 cp_method=ulysses"),
        ({"sequence_parallel_size": 1}, "auto"),
        ({"sequence_parallel_size": 4, "zero_optimization": {"stage": 3}}, "zero=3 cp=4 cp_method=ulysses"),
        ({"elasticity": {"enabled": False}, "pipeline": {}, "expert_parallel": {"enabled": False}}, "auto"),
    ],
)
def test_what_deepspeed_splits_is_split_alike(config: dict[str, Any], line: str) -> None:
    found = from_deepspeed(config, "ds.json")
    assert (str(parallel_of(found.settings)), found.warnings) == (line, ())


def test_options_of_tensor_parallelism_that_change_nothing_are_said() -> None:
    section = {"autotp_size": 2, "partition_config": {"layers": []}, "preset_model": "llama"}
    found = from_deepspeed({"tensor_parallel": section}, "ds.json")
    assert len(found.warnings) == 1  # a section of nothing asks for nothing
    assert "preset_model" in found.warnings[0] and "tp_plan=" in found.warnings[0]


@pytest.mark.parametrize("name", NOT_OPTIONS)
def test_options_of_accelerate_that_are_not_ours_are_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} .*\. .*\."):
        parallel_fields({name: object()})
