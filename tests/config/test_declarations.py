"""A setting is declared once: what else needs its name, flag, bounds or variable takes them from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.compat.accelerate import load
from lockstep.config import SETTINGS
from lockstep.errors import ConfigError
from tests.refusals import expect_refusal
from tests.site import commands


def test_the_flags_of_config_are_those_of_launch() -> None:
    found = dict(commands.walk())
    launch = {one.name: one for one in commands.options_of(found["launch"])}
    own = {"config_file", "yes", "force"}
    options = [one for one in commands.options_of(found["config"]) if one.name not in own]
    assert len(options) == 10
    for one in options:
        same = launch[one.name]
        assert (one.opts, one.help, one.is_flag) == (same.opts, same.help, same.is_flag)
        bounds = [(getattr(each.type, "min", None), getattr(each.type, "max", None)) for each in (one, same)]
        assert bounds[0] == bounds[1]


def test_help_says_the_default_that_holds() -> None:
    assert "(default: 300)" in SETTINGS["hang_timeout"].meaning
    assert SETTINGS["hang_timeout"].default == 300
    assert SETTINGS["watch"].default is True
    assert SETTINGS["watch"].meaning.endswith("(default: yes).")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gradient_clipping: -1", "gradient_clipping: -1 is not a number of at least 0."),
        ("optimizer: 5", "optimizer: 5 is not a section."),
        ("grad_scaler: {init_scale: x}", "grad_scaler.init_scale=x is not a number of at least 0."),
        ("parallel: zero=9", "parallel: zero=9 is not an integer from 0 to 3."),
    ],
)
def test_a_wrong_value_of_a_file_is_named_once(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text + "\n", encoding="utf-8")
    expect_refusal(ConfigError, f"run.yaml:1: {message}", load, path)
