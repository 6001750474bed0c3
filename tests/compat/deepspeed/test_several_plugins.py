"""Several DeepSpeed plugins in one run: models of different stages train as whole ones do."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep import Accelerator
from lockstep.errors import ConfigError
from lockstep.utils import DeepSpeedPlugin
from tests.refusals import expect_refusal


def test_names_are_those_that_were_given() -> None:
    several = [DeepSpeedPlugin(zero_stage=2), DeepSpeedPlugin(zero_stage=3)]
    run = Accelerator(cpu=True, deepspeed_plugins=several)
    run.state.select_deepspeed_plugin("plugin_1")
    assert run.deepspeed_plugin is several[1] and run.parallel.zero == 3
    with pytest.raises(ValueError, match="'teacher'.*plugin_0, plugin_1"):
        run.state.select_deepspeed_plugin("teacher")
    assert Accelerator(cpu=True).state.deepspeed_plugins == run.state.deepspeed_plugins
    with pytest.raises(ValueError, match="'first'"):
        Accelerator(cpu=True, parallel={}).state.select_deepspeed_plugin("first")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_clipping": 0.5}, "but 'a' does not"),
        ({"offload_param_device": "cpu"}, "deepspeed_plugins['b']"),
        ({"zero_stage": 0}, "deepspeed_plugins['b'] has stage 0"),
    ],
)
def test_plugins_that_differ_in_more_are_refused(options: dict[str, Any], message: str) -> None:
    plugins = {"a": DeepSpeedPlugin(zero_stage=2), "b": DeepSpeedPlugin(**{"zero_stage": 3, **options})}
    expect_refusal(ConfigError, message, Accelerator, cpu=True, deepspeed_plugins=plugins)
