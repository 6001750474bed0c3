"""What code, plugins, files and the environment ask of one ``Accelerator`` together."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils import DeepSpeedPlugin as TheirDeepSpeedPlugin

from lockstep import Accelerator, GradientAccumulationPlugin, GradScalerKwargs
from lockstep.compat import external_settings
from lockstep.config import AcceleratorArguments, Options, fit_to_world, resolve_options
from lockstep.errors import ConfigError
from lockstep.parallelism_config import ParallelismConfig
from lockstep.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, Parallel
from tests.compat.deepspeed_examples import STAGE2, STAGE3
from tests.refusals import expect_refusal


def options(**given: Any) -> Options:
    return resolve_options(AcceleratorArguments(**given), external_settings)


def refusal(world_size: int = 1, **given: Any) -> str:
    message = expect_refusal(ConfigError, "", lambda: fit_to_world(options(**given), world_size))
    assert "\n" not in message
    return message


def rule(name: str, module: Any) -> bool:
    return name.endswith("0")


def test_parallel_is_a_line_a_mapping_or_an_object() -> None:
    for given in (
        "zero=3 activation=full",
        {"zero": 3, "activation": "full"},
        Parallel(zero=3, activation="full"),
    ):  # type: ignore[arg-type]
        assert options(parallel=given).parallel == Parallel.parse("zero=3 activation=full")


def test_fields_of_parallel_are_keywords_of_their_own() -> None:
    accelerator = Accelerator(cpu=True, parallel="zero=3", activation="full", blocks=rule)
    assert accelerator._options.parallel == Parallel(zero=3, activation="full", blocks=rule)  # type: ignore[arg-type]
    assert accelerator._options.parallel.blocks is rule


@pytest.mark.parametrize(
    ("given", "sentences"),
    [
        ({"parallel": "zero=3", "zero": 2}, ["zero is 3", "zero=2"]),
        ({"zro": 3}, ["'zro'", "Did you mean 'zero'?"]),
        ({"activation": "ful"}, ["'ful'", "'full'"]),
        ({"replicate": 2}, ["replicate needs a stage of ZeRO"]),
        ({"parallel": "zer=3"}, ["Accelerator(...): parallel: 'zer' is", "Did you mean 'zero'?"]),
        ({"parallelism_config": object()}, ["parallelism_config is of type object"]),
        (
            {"parallelism_config": ParallelismConfig(dp_shard_size=2)},
            ["2 ranks", "dp_shard_size=2", "1 processes"],
        ),
        ({"torch_tp_plugin": object()}, ["torch_tp_plugin was given"]),
        ({"deepspeed_plugin": 3}, ["deepspeed_plugin is of type int"]),
        ({"deepspeed_plugins": {}}, ["0 plugins"]),
        (
            {
                "fsdp_plugin": FullyShardedDataParallelPlugin(),
                "deepspeed_plugin": DeepSpeedPlugin(zero_stage=1),
            },
            ["FULL_SHARD", "stage=1", "Pass one"],
        ),
    ],
)
def test_wrong_arguments_are_refused_with_their_values(given: dict[str, Any], sentences: list[str]) -> None:
    message = expect_refusal(ConfigError, "", Accelerator, cpu=True, **given)
    assert all(sentence in message for sentence in sentences), message


def test_a_line_in_code_replaces_that_of_the_environment_and_a_field_one_word_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCKSTEP_PARALLEL", "zero=2 activation=full")
    assert str(options().parallel) == "zero=2 activation=full"
    assert str(options(parallel="zero=3").parallel) == "zero=3"
    assert str(options(parallel_fields={"zero": 3}).parallel) == "zero=3 activation=full"


def test_an_fsdp_plugin_is_obeyed_on_cpus() -> None:
    plugin = FullyShardedDataParallelPlugin(reshard_after_forward=False, activation_checkpointing=True)
    assert str(Accelerator(cpu=True, fsdp_plugin=plugin)._options.parallel) == "zero=2 activation=full"


def test_a_deepspeed_plugin_says_everything_that_its_file_says(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(STAGE3))
    for config in (STAGE3, str(path), path):
        asked = options(deepspeed_plugin=DeepSpeedPlugin(config))
        assert (asked.mixed_precision, asked.gradient_clipping, asked.parallel.zero) == ("bf16", 1.0, 3)
        fitted = fit_to_world(asked, 4)
        assert (fitted.micro_batch_size, fitted.accumulation.num_steps) == (4, 2)


def test_a_plugin_is_given_back_and_has_its_configuration() -> None:
    plugin = DeepSpeedPlugin({"zero_optimization": {"stage": 3}})
    assert Accelerator(cpu=True, deepspeed_plugins={"student": plugin}).deepspeed_plugin is plugin
    assert plugin.zero_stage == 3 and plugin.deepspeed_config["zero_optimization"] == {"stage": 3}
    assert DeepSpeedPlugin().zero_stage == 2
    assert Accelerator(cpu=True).deepspeed_plugin is None


def test_accelerates_own_plugin_is_understood() -> None:
    theirs = TheirDeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=2, gradient_clipping=0.5)
    asked = options(deepspeed_plugin=theirs)
    assert (str(asked.parallel), asked.accumulation.num_steps, asked.gradient_clipping) == ("zero=3", 2, 0.5)


def test_auto_takes_what_the_code_says() -> None:
    plugin = DeepSpeedPlugin(STAGE2)
    asked = options(deepspeed_plugin=plugin, mixed_precision="fp16", gradient_accumulation_steps=4)
    assert (asked.mixed_precision, asked.accumulation.num_steps) == ("fp16", 4)
    assert (asked.scaler.init_scale, asked.scaler.growth_interval) == (4096.0, 1000)
    assert asked.gradient_clipping is None and fit_to_world(asked, 2).micro_batch_size is None
    assert asked.optimizer is not None and asked.optimizer.params["lr"] == "auto"


def test_batch_sizes_give_the_accumulation_for_the_number_of_processes() -> None:
    config = {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
    asked = options(deepspeed_plugin=DeepSpeedPlugin(config))
    assert fit_to_world(asked, 4).accumulation.num_steps == 3
    assert fit_to_world(asked, 2).accumulation.num_steps == 6
    assert fit_to_world(asked, 2).accumulation.sync_with_dataloader


BF16 = DeepSpeedPlugin({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}})


@pytest.mark.parametrize(
    ("world", "given", "sentences"),
    [
        (
            1,
            {"deepspeed_plugin": BF16, "mixed_precision": "fp16"},
            ["bf16.enabled=True", "mixed_precision='fp16'"],
        ),
        (
            1,
            {"deepspeed_plugin": BF16, "mixed_precision": "no"},
            ["bf16.enabled=True", "mixed_precision='no'"],
        ),
        (
            1,
            {"deepspeed_plugin": DeepSpeedPlugin({"bf16": {"enabled": False}}), "mixed_precision": "bf16"},
            ["bf16.enabled=False", "mixed_precision='bf16'"],
        ),
        (
            1,
            {"deepspeed_plugin": DeepSpeedPlugin(STAGE3), "gradient_accumulation_steps": 4},
            ["gradient_accumulation_steps=2 (deepspeed_plugin)", "gradient_accumulation_steps=4 (code)"],
        ),
        (
            1,
            {
                "deepspeed_plugin": DeepSpeedPlugin(STAGE3),
                "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3),
            },
            ["gradient_accumulation_steps=2", "gradient_accumulation_steps=3 (gradient_accumulation_plugin)"],
        ),
        (1, {"deepspeed_plugin": BF16, "parallel": "zero=3"}, ["stage=2", "parallel='zero=3'"]),
        (1, {"deepspeed_plugin": BF16, "parallel": "ddp"}, ["'ddp'", "zero=2"]),
        (
            1,
            {"fsdp_plugin": FullyShardedDataParallelPlugin(), "parallel": "zero=2"},
            ["FULL_SHARD", "parallel='zero=2'"],
        ),
        (
            1,
            {
                "deepspeed_plugin": DeepSpeedPlugin(STAGE2),
                "kwargs_handlers": [GradScalerKwargs(init_scale=2.0)],
            },
            ["initial_scale_power=12", "GradScalerKwargs(init_scale=2.0)"],
        ),
        (
            1,
            {"deepspeed_plugin": DeepSpeedPlugin({"zero_optimization": {"stage": 3}}, zero_stage=2)},
            ["zero_optimization.stage=3", "zero_stage=2"],
        ),
        (3, {"deepspeed_plugin": DeepSpeedPlugin(STAGE3)}, ["hpz=2 must divide the 3 ranks"]),
        (
            2,
            {"deepspeed_plugin": DeepSpeedPlugin({"train_batch_size": 7})},
            ["7 does not divide by", "2 processes"],
        ),
        (3, {"parallel": "zero=3 replicate=2"}, ["3 / 2 is not whole"]),
    ],
)
def test_a_configuration_that_contradicts_the_code_is_refused_with_both_values(
    world: int, given: dict[str, Any], sentences: list[str]
) -> None:
    message = refusal(world, **given)
    assert all(sentence in message for sentence in sentences), message


def test_the_environments_file_and_settings_reach_the_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}, "wall_clock_breakdown": True}))
    monkeypatch.setenv("LOCKSTEP_DEEPSPEED_CONFIG_FILE", str(path))
    monkeypatch.setenv("LOCKSTEP_OPTIMIZER", '{"type": "SGD", "params": {"lr": 0.5}}')
    monkeypatch.setenv("LOCKSTEP_GRAD_SCALER", '{"init_scale": 8}')
    monkeypatch.setenv("LOCKSTEP_MICRO_BATCH_SIZE", "4")
    asked = options()
    assert asked.parallel.zero == 1 and asked.optimizer is not None and asked.optimizer.params == {"lr": 0.5}
    assert asked.scaler.init_scale == 8 and fit_to_world(asked, 2).micro_batch_size == 4
    with pytest.warns(UserWarning, match="wall_clock_breakdown"):
        Accelerator(cpu=True)
    assert "zero=2" in refusal(parallel="zero=2")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"},
            "zero=2",
        ),
        (
            {
                "ACCELERATE_USE_FSDP": "true",
                "FSDP_VERSION": "1",
                "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP",
                "FSDP_RESHARD_AFTER_FORWARD": "true",
                "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
                "FSDP_OFFLOAD_PARAMS": "true",
                "FSDP_SOMETHING_ELSE": "1",
            },
            "zero=2 offload blocks=Block",
        ),
        (
            {
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
            },
            "zero=3 offload=params",
        ),
        (
            {
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme",
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/scratch",
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "none",
            },
            "zero=3 offload=params offload_to=/scratch",
        ),
        ({"ACCELERATE_USE_FSDP": "false", "FSDP_VERSION": "2"}, "auto"),
    ],
)
def test_what_accelerate_launch_passes_on_is_obeyed(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(options().parallel) == expected


def test_the_precision_that_accelerate_launch_always_sets_contradicts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert options(deepspeed_plugin=BF16).mixed_precision == "bf16"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert "ACCELERATE_MIXED_PRECISION" in refusal(deepspeed_plugin=BF16)


def test_a_plain_accelerator_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked = Accelerator(cpu=True)._options
    assert (str(asked.parallel), asked.gradient_clipping, asked.optimizer, asked.config_warnings) == (
        "auto",
        None,
        None,
        (),
    )
