"""Every key that the other libraries know is in our tables."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedPlugin as TheirDeepSpeedPlugin
from accelerate.utils import FullyShardedDataParallelPlugin as TheirFSDPPlugin

from lockstep.compat import deepspeed, fsdp
from lockstep.compat.accelerate import (
    FOREIGN_FLAGS,
    LAYOUT_KEYS,
    LAYOUT_PREFIX,
    ONLY_IN_ACCELERATE,
    OTHER_KEYS,
    SECTIONS,
)
from lockstep.compat.deepspeed import DEEPSPEED_KEYS, FILE_KEY, OWN_FIELDS
from lockstep.compat.fsdp import FIELD_NAMES
from lockstep.config import IN_FILES
from lockstep.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

# read from the constants and pydantic models of the version that the file names
RECORDED = json.loads((Path(__file__).parent / "deepspeed_keys.json").read_text(encoding="utf-8"))


def at(path: str) -> Any:
    table: Any = deepspeed.KEYS
    for name in filter(None, path.split(".")):
        table = table[name]
    return table


@pytest.mark.parametrize("path", RECORDED["sections"])
def test_every_key_of_a_deepspeed_section_has_a_rule(path: str) -> None:
    table = at(path)
    assert isinstance(table, Mapping)
    assert set(RECORDED["sections"][path]) - set(table) == set()


def flags(title: str) -> set[str]:
    """The names of the options in a group of `accelerate launch`."""
    groups = [group for group in launch_command_parser()._action_groups if title in (group.title or "")]
    return {action.dest for group in groups for action in group._group_actions}


def test_every_fsdp_flag_of_accelerate_has_a_rule() -> None:
    names = flags("FSDP")
    assert len(names) > 10
    assert {name.removeprefix("fsdp_") for name in names} - set(fsdp.KEYS) == set()


def test_every_deepspeed_and_layout_flag_of_accelerate_has_a_rule() -> None:
    assert flags("DeepSpeed") - set(DEEPSPEED_KEYS) == {FILE_KEY}
    layout = {name.removeprefix(LAYOUT_PREFIX) for name in flags("ParallelismConfig")}
    fields = {field.name for field in dataclasses.fields(ParallelismConfig)}
    assert layout and (layout | fields) - set(LAYOUT_KEYS) == set()


def test_launch_takes_every_sharding_flag_of_accelerate() -> None:
    wanted = flags("FSDP") | flags("DeepSpeed") | flags("ParallelismConfig")
    assert wanted - set(FOREIGN_FLAGS) == {
        "deepspeed_config_file",
        "gradient_accumulation_steps",
        "gradient_clipping",
    }


def test_the_plugins_have_the_fields_of_accelerates_and_each_has_a_rule() -> None:
    ours = {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)}
    assert {field.name for field in dataclasses.fields(TheirFSDPPlugin)} - ours == set()
    named = {FIELD_NAMES.get(name, name) for name in ours - {"mixed_precision_policy"}}
    assert named - set(fsdp.KEYS) == set()
    mine = {field.name for field in dataclasses.fields(DeepSpeedPlugin)}
    assert {field.name for field in dataclasses.fields(TheirDeepSpeedPlugin) if field.init} - mine == set()
    assert set(OWN_FIELDS) - set(DEEPSPEED_KEYS) == set()


def test_every_key_of_accelerates_file_is_known() -> None:
    names = {field.name for field in dataclasses.fields(ClusterConfig)}
    known = {*IN_FILES, *OTHER_KEYS, *SECTIONS, *ONLY_IN_ACCELERATE}
    assert names - known == set()
