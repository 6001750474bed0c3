"""What was asked for elsewhere than in the plain arguments: plugins, a DeepSpeed JSON, Accelerate's variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config.deepspeed import from_deepspeed
from lockstep.config.fsdp import KEYS as FSDP_KEYS
from lockstep.config.fsdp import from_fsdp, from_fsdp_plugin
from lockstep.config.plugins import check_fsdp_plugin, from_deepspeed_plugin, the_plugin
from lockstep.config.rules import Said, Translation, combine
from lockstep.config.sections import FILE_KEY, from_deepspeed_section
from lockstep.config.sources import accelerate_sections, process_environment
from lockstep.errors import ConfigError


@dataclass(frozen=True)
class Elsewhere:
    """Settings and warnings; ``plugin`` is the one DeepSpeed plugin, if there is one."""

    says: Mapping[str, Said]
    warnings: tuple[str, ...] = ()
    plugin: Any = None


def asked_elsewhere(
    config_file: str | None, fsdp_plugin: Any, deepspeed_plugin: Any, deepspeed_plugins: Any
) -> Elsewhere:
    """Everything that plugins, the file ``config_file`` and the variables of ``accelerate launch`` ask for.

    Raises:
        ConfigError: one of them is not valid, or they contradict each other.
    """
    plugin = the_plugin(deepspeed_plugin, deepspeed_plugins)
    found: list[Translation] = []
    if check_fsdp_plugin(fsdp_plugin) is not None:
        found.append(from_fsdp_plugin(fsdp_plugin, _machines()))
    if plugin is not None:
        found.append(from_deepspeed_plugin(plugin))
    if len(found) == 2:
        raise ConfigError(
            f"fsdp_plugin ({_stage(found[0])}) and deepspeed_plugin ({_stage(found[1])}) were both given. Pass one."
        )
    if config_file is not None:
        found.append(from_deepspeed(config_file))
    found += _from_environment()
    warnings = dict.fromkeys(text for part in found for text in part.warnings)
    return Elsewhere(combine(*(part.says for part in found)), tuple(warnings), plugin)


def _stage(part: Translation) -> str:
    stage = part.says.get("zero")
    return stage.source if stage is not None else "no stage"


def _machines() -> int:
    here = process_environment(need_rendezvous=False)
    return max(1, here.world_size // here.local_world_size)


def _from_environment() -> list[Translation]:
    sections = accelerate_sections()
    found = []
    if "fsdp_config" in sections:
        section = {key: value for key, value in sections["fsdp_config"].items() if key in FSDP_KEYS}
        found.append(from_fsdp(section, "variables FSDP_*", _machines()))
    if "deepspeed_config" in sections:
        part = from_deepspeed_section(sections["deepspeed_config"], "variables ACCELERATE_DEEPSPEED_*")
        says = {name: said for name, said in part.says.items() if name != FILE_KEY}  # read as a setting
        found.append(Translation(says, part.warnings))
    return found
