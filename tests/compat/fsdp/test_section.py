from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin as TheirFSDPPlugin
from accelerate.utils.constants import FSDP_AUTO_WRAP_POLICY, FSDP_SHARDING_STRATEGY, FSDP_STATE_DICT_TYPE
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

from lockstep.compat import Translation
from lockstep.compat.accelerate import from_yaml
from lockstep.compat.fsdp import KEYS, STRATEGIES, from_fsdp, from_fsdp_plugin
from lockstep.config import parallel_of, parse_yaml, precision_of
from lockstep.errors import ConfigError
from lockstep.utils import FullyShardedDataParallelPlugin
from tests.marks import examples
from tests.refusals import expect_refusal


def line(config: Any, machines: int = 1) -> str:
    return str(parallel_of(from_fsdp(config, "run.yaml", machines).settings))


def plugin(**fields: Any) -> Translation:
    return from_fsdp_plugin(FullyShardedDataParallelPlugin(**fields))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "zero=3"),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": True}, "zero=3"),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": "false"}, "zero=2"),
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, "zero=3"),
        ({"fsdp_sharding_strategy": "shard_grad_op"}, "zero=2"),
        ({"fsdp_sharding_strategy": 2}, "zero=2"),
        ({"fsdp_sharding_strategy": "3"}, "auto"),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, "auto"),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, "zero=3"),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, "zero=2"),
        ({"fsdp_offload_params": True, "fsdp_forward_prefetch": True}, "zero=3 offload forward_prefetch"),
        ({"fsdp_activation_checkpointing": True}, "zero=3 activation=full"),
        (
            {"fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": True},
            "zero=3 activation=offload",
        ),
        (
            {
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_transformer_layer_cls_to_wrap": "Block, Layer",
            },
            "zero=3 blocks=Block,Layer",
        ),
        ({"transformer_layer_cls_to_wrap": ["Block"]}, "zero=3 blocks=Block"),
    ],
)
def test_fsdp_words_become_words_of_parallel(config: dict[str, Any], expected: str) -> None:
    assert line(config) == expected


def test_hybrid_sharding_has_a_copy_on_each_machine() -> None:
    assert line({"fsdp_sharding_strategy": "HYBRID_SHARD"}, machines=4) == "zero=3 replicate=4"
    assert line({"fsdp_sharding_strategy": 5}, machines=2) == "zero=2 replicate=2"


def test_the_numbers_of_strategies_are_those_of_torch() -> None:
    assert [name.lower() for name in FSDP_SHARDING_STRATEGY] == list(STRATEGIES)
    for strategy in ShardingStrategy:
        by_name, by_number = (
            line({"sharding_strategy": strategy.name}),
            line({"sharding_strategy": strategy.value}),
        )
        assert by_name == by_number


def test_every_word_that_accelerate_offers_is_taken() -> None:
    for word in FSDP_AUTO_WRAP_POLICY:
        line({"fsdp_auto_wrap_policy": word})
    for word in FSDP_STATE_DICT_TYPE:
        line({"fsdp_state_dict_type": word})
    for word in ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"):
        line({"fsdp_backward_prefetch": word})


@pytest.mark.parametrize(
    ("config", "sentences"),
    [
        ({"fsdp_shardin_strategy": 1}, ["fsdp_shardin_strategy", "Did you mean 'fsdp_sharding_strategy'"]),
        ({"fsdp_sharding_strategy": "HALF"}, ["fsdp_sharding_strategy='HALF'", "full_shard"]),
        ({"fsdp_sharding_strategy": 6}, ["fsdp_sharding_strategy=6"]),
        ({"fsdp_version": 3}, ["fsdp_version=3", "from 1 to 2"]),
        ({"fsdp_state_dict_type": "HALF_STATE_DICT"}, ["HALF_STATE_DICT"]),
        ({"fsdp_ignored_modules": "a.*"}, ["modules that are not sharded"]),
        ({"fsdp_activation_checkpointing_offload": True}, ["needs activation_checkpointing"]),
        (
            {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": False},
            ["fsdp_sharding_strategy='FULL_SHARD'", "fsdp_reshard_after_forward=False", "contradicts"],
        ),
        ({"fsdp_offload_params": "perhaps"}, ["fsdp_offload_params=perhaps"]),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(config: dict[str, Any], sentences: list[str]) -> None:
    message = expect_refusal(ConfigError, "", line, config)
    assert all(sentence in message for sentence in sentences), message


@pytest.mark.parametrize(
    "key", ["cpu_ram_efficient_loading", "auto_wrap_policy", "backward_prefetch", "sync_module_states"]
)
def test_what_has_no_effect_is_said_by_name(key: str) -> None:
    value = {"auto_wrap_policy": "NO_WRAP", "backward_prefetch": "NO_PREFETCH", "sync_module_states": False}
    (warning,) = from_fsdp({"fsdp_" + key: value.get(key, True)}, "run.yaml").warnings
    assert f"run.yaml: fsdp_{key}=" in warning and "has no effect" in warning


def test_plugin_objects_of_torch_become_words() -> None:
    assert str(parallel_of(plugin(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP).settings)) == "zero=2"
    assert str(parallel_of(plugin(cpu_offload=CPUOffload(offload_params=True)).settings)) == "zero=3 offload"
    assert str(parallel_of(plugin(cpu_offload=CPUOffloadPolicy()).settings)) == "zero=3 offload"
    assert str(parallel_of(plugin(cpu_offload=CPUOffload(offload_params=False)).settings)) == "zero=3"
    assert plugin().warnings == ()


@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        {"param_dtype": torch.bfloat16, "reduce_dtype": "float32"},
    ],
)
def test_a_mixed_precision_policy_is_a_precision_and_a_type_of_reduction(policy: Any) -> None:
    found = plugin(mixed_precision_policy=policy)
    assert (precision_of(found.settings), str(parallel_of(found.settings))) == ("bf16", "zero=3 reduce=fp32")


@pytest.mark.parametrize(
    "policy",
    [
        ModuleWrapPolicy({nn.Linear}),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}),
    ],
)
def test_a_wrap_policy_of_torch_becomes_a_rule_for_blocks(policy: Any) -> None:
    rule = parallel_of(plugin(auto_wrap_policy=policy).settings).blocks
    assert callable(rule)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert [name for name, module in model.named_modules() if rule(name, module)] == ["0", "2"]


def test_accelerates_own_plugin_is_understood() -> None:
    theirs = TheirFSDPPlugin(
        sharding_strategy="SHARD_GRAD_OP",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        activation_checkpointing=True,
    )
    assert str(parallel_of(from_fsdp_plugin(theirs).settings)) == "zero=2 activation=full blocks=Block"


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 7), st.text(max_size=6), st.lists(st.text(max_size=3), max_size=2),
    st.sampled_from(["auto", "FULL_SHARD", "NO_WRAP", "true", "SIZE_BASED_WRAP", "BACKWARD_PRE"]),
)  # fmt: skip


@examples(150)
@given(st.dictionaries(st.one_of(st.sampled_from([*KEYS]), st.text(max_size=4)), VALUES, max_size=6))
def test_any_section_gives_settings_or_one_message(config: dict[str, Any]) -> None:
    try:
        parallel_of(from_fsdp(config, "run.yaml").settings)
    except ConfigError as error:
        assert "\n" not in str(error)  # noqa: PT017


# -- in a file -----------------------------------------------------------------------------------------


def read(text: str) -> Any:
    return from_yaml(parse_yaml(text, "run.yaml"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("distributed_type: FSDP\nnum_processes: 4\n", {"parallel": "zero=3"}),
        ("distributed_type: DEEPSPEED\nnum_processes: 4\n", {"parallel": "zero=2"}),
        (
            "deepspeed_config: {zero_stage: 3, gradient_clipping: 0.5, gradient_accumulation_steps: 4}\n",
            {"parallel": "zero=3", "gradient_clipping": 0.5, "gradient_accumulation_steps": 4},
        ),
        (
            "parallelism_config: {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 4}\n",
            {"parallel": "zero=3 replicate=2", "num_processes": 8},
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false}\n"
            "parallelism_config: {dp_replicate_size: 2, dp_shard_size: 2}\n",
            {"parallel": "zero=2 replicate=2", "num_processes": 4},
        ),
        ("parallel: {zero: 3, activation: full}\n", {"parallel": "zero=3 activation=full"}),
        ("parallel: offload zero=2\n", {"parallel": "zero=2 offload"}),
    ],
)
def test_sections_of_a_file_become_settings(text: str, expected: dict[str, Any]) -> None:
    given_settings = read(text).config.given()
    assert {name: given_settings[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("fsdp_config: {fsdp_version: 2}\ndistributed_type: MULTI_GPU\n", ["distributed_type is MULTI_GPU"]),
        ("fsdp_config: {fsdp_version: 2}\ndistributed_type: DEEPSPEED\n", ["distributed_type is DEEPSPEED"]),
        ("fsdp_config: {fsdp_version: 2}\ndeepspeed_config: {zero_stage: 1}\n", ["both shard the model"]),
        ("fsdp_config: {fsdp_version: 2}\nparallel: zero=1\n", ["parallel='zero=1'", "contradicts"]),
        (
            "parallelism_config: {cp_size: 2, sp_size: 2}\n",
            ["cp_size=2", "sp_size=2", "both split the sequence"],
        ),
        ("parallelism_config: {dp_shard_size: 2}\nnum_processes: 3\n", ["num_processes=3", "contradicts"]),
        ("deepspeed_config: {offload_param_device: nvme}\n", ["nvme", "has no folder"]),
        (
            "deepspeed_config: {deepspeed_hostfile: hosts, deepspeed_multinode_launcher: standard}\n",
            ["deepspeed_multinode_launcher=standard", "deepspeed_hostfile='hosts'"],
        ),
        ("deepspeed_config: {deepspeed_multinode_launcher: pdsh}\n", ["needs deepspeed_hostfile"]),
        ("deepspeed_config: {deepspeed_multinode_launcher: impi}\n", ["'impi'", "is not available"]),
        (
            "deepspeed_config: {gradient_accumulation_steps: 4}\ngradient_accumulation_steps: 2\n",
            ["gradient_accumulation_steps=4", "gradient_accumulation_steps=2"],
        ),
        ("deepspeed_config: {deepspeed_config_file: /nonexistent.json}\n", ["cannot read"]),
        ("parallel: sequence_parallel\n", ["run.yaml:1: parallel: ", "sequence_parallel needs tp"]),
    ],
)
def test_contradictions_in_a_file_show_both_values(text: str, sentences: list[str]) -> None:
    message = expect_refusal(ConfigError, "", read, text)
    assert message.startswith("run.yaml")
    assert all(sentence in message for sentence in sentences), message
