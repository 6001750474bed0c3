from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.compat.deepspeed import KEYS, from_deepspeed
from lockstep.config import BatchSizes, SettingValue, parallel_of, precision_of, read_json
from lockstep.errors import ConfigError
from tests.compat.deepspeed_examples import STAGE2, STAGE3
from tests.marks import examples
from tests.refusals import expect_refusal


def refusal(config: Any) -> str:
    return expect_refusal(ConfigError, "", from_deepspeed, config, "ds.json")


def values(config: Any) -> dict[str, Any]:
    return {name: said.value for name, said in from_deepspeed(config, "ds.json").settings.items()}


def test_a_stage_2_file_full_of_auto_says_the_rest() -> None:
    found = from_deepspeed(STAGE2, "ds.json")
    assert str(parallel_of(found.settings)) == "zero=2"
    assert precision_of(found.settings) == "no"
    said = values(STAGE2)
    assert (said["init_scale"], said["growth_interval"]) == (4096.0, 1000)
    assert (said["optimizer"].type, said["optimizer"].params["weight_decay"]) == ("AdamW", 0.1)
    assert said["optimizer"].params["lr"] == "auto"
    assert said["scheduler"].params["warmup_num_steps"] == 50
    assert not {"gradient_clipping", "train_batch_size", "gradient_accumulation_steps"} & set(said)
    assert [text.split(" ")[1].split("=")[0] for text in found.warnings] == [
        "zero_optimization.allgather_bucket_size",
        "steps_per_print",
    ]


def test_a_stage_3_file_with_everything_becomes_one_line() -> None:
    found = from_deepspeed(STAGE3, "ds.json")
    assert str(parallel_of(found.settings)) == (
        "zero=3 hpz=2 reduce=fp32 quantized_weights=int8 quantized_gradients=int8 offload activation=offload"
    )
    assert precision_of(found.settings) == "bf16"
    assert found.warnings == ()
    assert BatchSizes.of(found.settings).solved(4).accumulation == 2


def test_the_defaults_of_deepspeed_written_out_ask_for_nothing() -> None:
    defaults = {
        "zero_optimization": {
            "stage": 2, "contiguous_gradients": True, "reduce_scatter": True, "reduce_bucket_size": 500_000_000,
            "allgather_bucket_size": 500_000_000, "overlap_comm": True, "sub_group_size": 1_000_000_000,
            "stage3_prefetch_bucket_size": 50_000_000, "stage3_param_persistence_threshold": 100_000,
            "stage3_max_live_parameters": 1_000_000_000, "ignore_unused_parameters": True, "legacy_stage1": False,
            "zero_hpz_partition_size": 1, "zero_quantized_weights": False, "memory_efficient_linear": True,
        },
        "flops_profiler": {"enabled": False, "profile_step": 1},
        "tensorboard": {"enabled": False, "job_name": "x"},
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512},
        "elasticity": {"enabled": False, "max_train_batch_size": 2000},
        "gradient_predivide_factor": 1.0,
        "prescale_gradients": False,
    }  # fmt: skip
    found = from_deepspeed(defaults, "ds.json")
    assert (found.warnings, values(defaults)) == ((), {"zero": 2})


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"wall_clock_breakdown": True}, "wall_clock_breakdown"),
        ({"flops_profiler": {"enabled": True, "profile_step": 2}}, "flops_profiler.enabled"),
        ({"tensorboard": {"enabled": True}}, "tensorboard.enabled"),
        ({"zero_optimization": {"stage": 1, "contiguous_gradients": False}}, "contiguous_gradients"),
        (
            {"zero_optimization": {"stage": 3, "param_persistence_threshold": 7}},
            "param_persistence_threshold",
        ),
        ({"activation_checkpointing": {"partition_activations": True}}, "partition_activations"),
        ({"fp16": {"enabled": True, "hysteresis": 5}}, "fp16.hysteresis"),
        ({"checkpoint": {"parallel_write": {"pipeline_stage": True}}}, "parallel_write.pipeline_stage"),
    ],
)
def test_what_has_no_effect_is_said_by_name_when_it_asks_for_something(config: Any, name: str) -> None:
    (warning,) = from_deepspeed(config, "ds.json").warnings
    assert name in warning and "has no effect: " in warning


@pytest.mark.parametrize(
    ("key", "hint"),
    [("_comment", ""), ("comms_config", ""), ("zero_optimisation", "Did you mean 'zero_optimization'?")],
)
def test_a_key_beside_the_sections_that_nobody_knows_is_said_to_have_no_effect(key: str, hint: str) -> None:
    found = from_deepspeed({key: {"a": 1}, "gradient_clipping": 1.0}, "ds.json")
    (warning,) = found.warnings
    assert warning.startswith(f"ds.json: {key} is not known, so it has no effect") and hint in warning
    assert found.settings["gradient_clipping"].value == 1.0


@pytest.mark.parametrize(
    ("config", "sentences"),
    [
        ({"zero_optimization": {"stge": 2}}, ["zero_optimization.stge", "Did you mean 'stage'?"]),
        ({"zero_optimization": True}, ["zero_optimization: True is not a section"]),
        ({"zero_optimization": {"stage": 4}}, ["zero_optimization.stage=4", "from 0 to 3"]),
        ({"zero_optimization": {"stage": 2.5}}, ["zero_optimization.stage=2.5"]),
        ({"zero_optimization": {"stage": True}}, ["zero_optimization.stage=True"]),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            ["device='nvme'", "nvme_path"],
        ),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "moon"}}}, ["device='moon'", "nvme"]),
        ({"zero_optimization": {"stage": 3, "zenflow": {"topk_ratio": 0.1}}}, ["ZenFlow"]),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["fp16.enabled=True", "bf16.enabled=True"]),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, ["master weights in fp16"]),
        ({"fp16": {"initial_scale_power": 99}}, ["initial_scale_power=99", "from 0 to 32"]),
        ({"fp16": {"loss_scale": math.nan}}, ["loss_scale=nan is not a number"]),
        ({"tensor_parallel": {"autotp_size": "x"}}, ["tensor_parallel.autotp_size=x is not an integer"]),
        ({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}, ["autotp_size=2", "tp_size=4"]),
        ({"tensor_parallel": {"tp": {"mpu": "x"}}}, ["tensor_parallel.tp.mpu", "made elsewhere"]),
        ({"sequence_parallel_size": -2}, ["sequence_parallel_size=-2 is not an integer"]),
        ({"expert_parallel": {"enabled": True}}, ["expert_parallel=", "not available", "parallel='ep=N'"]),
        ({"pipeline": {"stages": 2}}, ["pipeline=", "not available", "parallel='pp=N"]),
        ({"elasticity": {"enabled": True}}, ["elasticity=", "not available", "--nnodes MIN:MAX"]),
        ({"curriculum_learning": {"enabled": True}}, ["curriculum learning"]),
        ({"gradient_clipping": -1}, ["gradient_clipping=-1 is not a number of at least 0"]),
        ({"gradient_allreduce_op": "sum"}, ["gradient_allreduce_op='sum'"]),
        ({"communication_data_type": "bf16"}, ["communication_data_type='bf16'", "needs ZeRO"]),
        ({"optimizer": {"type": "AdamW", "parms": {}}}, ["'parms'", "Did you mean 'params'?"]),
        ({"optimizer": {"params": {"lr": 1}}}, ["optimizer.type=None is not a name"]),
        ({"torch_autocast": {"enabled": True, "dtype": "fp32"}}, ["has no effect"]),
        ([1], ["list"]),
        (3, ["int"]),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(config: Any, sentences: list[str]) -> None:
    message = refusal(config)
    assert all(sentence in message for sentence in sentences), message
    assert "\n" not in message


CPU, A, B = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/a"}, {"device": "nvme", "nvme_path": "/b"}


@pytest.mark.parametrize(
    ("optimizer", "param", "line"),
    [
        (CPU, None, "offload=optimizer"),
        (None, CPU, "offload=params"),
        (CPU, CPU, "offload"),
        (CPU, {"device": "none", "nvme_path": "/a"}, "offload=optimizer"),
        (A, None, "offload=optimizer offload_to=/a"),
        (None, A, "offload=params offload_to=/a"),
        (A, A, "offload offload_to=/a"),
        (CPU, A, "offload=params offload_to=/a"),  # where the optimizer is on the host
        (A, CPU, None),
        (A, B, None),
    ],
)
def test_each_part_is_offloaded_to_where_the_file_says(optimizer: Any, param: Any, line: str | None) -> None:
    parts = {"offload_optimizer": optimizer, "offload_param": param}
    config = {"zero_optimization": {"stage": 3, **{name: part for name, part in parts.items() if part}}}
    if line is None:
        message = refusal(config)
        assert "'nvme' (ds.json) in /a" in message and "name two places" in message
        return
    found = from_deepspeed(config, "ds.json")
    assert (str(parallel_of(found.settings)), found.warnings) == (f"zero=3 {line}", ())


def test_older_switches_offload_the_same_parts() -> None:
    for keys, line in (
        (["cpu_offload"], "offload=optimizer"),
        (["cpu_offload_params"], "offload=params"),
        (["cpu_offload", "cpu_offload_param"], "offload"),
    ):
        config = {"zero_optimization": {"stage": 3} | dict.fromkeys(keys, True)}
        assert str(parallel_of(from_deepspeed(config, "ds.json").settings)) == f"zero=3 {line}"
        off = {"zero_optimization": {"stage": 3} | dict.fromkeys(keys, False)}
        assert str(parallel_of(from_deepspeed(off, "ds.json").settings)) == "zero=3"


def test_a_fixed_loss_scale_never_changes_in_torchs_scaler() -> None:
    said = values({"fp16": {"enabled": True, "loss_scale": 128}})
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=said["init_scale"], growth_interval=said["growth_interval"],
        backoff_factor=said["backoff_factor"],
    )  # fmt: skip
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for gradient in (1.0, math.inf, math.inf, 2.0):
        weight.grad = scaler.scale(torch.tensor([gradient]))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 128


def test_torch_autocast_is_mixed_precision_and_may_stand_beside_a_disabled_bf16() -> None:
    config = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "bf16": {"enabled": False}}
    assert precision_of(from_deepspeed(config).settings) == "bf16"


@given(
    micro=st.integers(1, 64), accumulation=st.integers(1, 16), world=st.integers(1, 64), drop=st.integers(0, 3),
    wrong=st.integers(0, 3),
)  # fmt: skip
def test_any_two_batch_sizes_give_the_third(
    micro: int, accumulation: int, world: int, drop: int, wrong: int
) -> None:
    train = micro * accumulation * world
    said = BatchSizes(
        None if drop == 1 else train, None if drop == 2 else micro, None if drop == 3 else accumulation
    )
    solved = said.solved(world)
    assert (solved.micro, solved.accumulation) == (micro, accumulation)
    if wrong and drop == 0:
        with pytest.raises(ConfigError, match=f"{train}"):
            BatchSizes(train + wrong, micro, accumulation).solved(world)


def test_batch_sizes_that_do_not_fit_show_the_arithmetic() -> None:
    expect_refusal(
        ConfigError,
        "= 24, not 32",
        BatchSizes(32, 4, 2).solved,
        3,
    )
    expect_refusal(ConfigError, "32", BatchSizes(32).solved, 3)


def test_a_missing_file_and_a_mapping_that_contains_itself_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read_json(tmp_path / "none.json")
    loop: dict[str, Any] = {}
    loop["zero_optimization"] = loop
    assert "nested deeper" in refusal(loop)


NAMES = [*KEYS, *KEYS["zero_optimization"], "enabled", "device", "type", "params", "stge"]  # type: ignore[misc]
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from(["auto", "cpu", "nvme", "none", "fp16", "bf16", "AdamW", "", 0, 1, 3, 2.0, -1]),
)  # fmt: skip
CONFIGS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=5)), inner, max_size=5),
    ),
    max_leaves=12,
)


@examples(150)
@given(st.dictionaries(st.one_of(st.sampled_from(NAMES), st.integers()), CONFIGS, max_size=6))
def test_any_mapping_gives_settings_or_one_message(config: dict[Any, Any]) -> None:
    try:
        found = from_deepspeed(config)
        parallel_of(found.settings)
    except ConfigError:
        return
    assert all(isinstance(said, SettingValue) for said in found.settings.values())
