"""What was asked for elsewhere than in the plain arguments: plugins, a DeepSpeed JSON, Accelerate's variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config.deepspeed import finish, from_deepspeed
from lockstep.config.fsdp import KEYS as FSDP_KEYS
from lockstep.config.fsdp import from_fsdp, from_fsdp_plugin
from lockstep.config.plugins import check_fsdp_plugin, from_deepspeed_plugin, the_plugin
from lockstep.config.rules import Translation, combine, translate
from lockstep.config.sections import DEEPSPEED_KEYS, DEFAULT_STAGE, FILE_KEY
from lockstep.config.sources import accelerate_sections, process_environment
from lockstep.config.values import SettingValue, plain, suggestion
from lockstep.errors import ConfigError


@dataclass(frozen=True)
class Elsewhere:
    """Settings and warnings; ``plugin`` is the one DeepSpeed plugin, if there is one."""

    says: Mapping[str, SettingValue]
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
    found.append(asked_by_environment())
    warnings = dict.fromkeys(text for part in found for text in part.warnings)
    return Elsewhere(combine(*(part.says for part in found)), tuple(warnings), plugin)


def _stage(part: Translation) -> str:
    stage = part.says.get("zero")
    return stage.source if stage is not None else "no stage"


def _machines() -> int:
    here = process_environment(need_rendezvous=False)
    return max(1, here.world_size // here.local_world_size)


def asked_by_environment(
    environ: Mapping[str, str] | None = None, machines: int | None = None
) -> Translation:
    """What the variables of ``accelerate launch`` for FSDP and DeepSpeed ask for; messages have their names.

    ``machines``: of the run; None: as this process's place says.

    Raises:
        ConfigError: a value is not allowed, or they contradict each other.
    """
    sections = accelerate_sections(environ)
    found = []
    if "fsdp_config" in sections:
        found.append(_fsdp(sections["fsdp_config"], _machines() if machines is None else machines))
    if "deepspeed_config" in sections:
        found.append(_deepspeed(sections["deepspeed_config"]))
    return Translation(
        combine(*(part.says for part in found)), tuple(text for part in found for text in part.warnings)
    )


WHERE = "environment"


def _fsdp(section: Mapping[str, tuple[str, str]], machines: int) -> Translation:
    known = {name: key for name, (key, _) in section.items() if key in FSDP_KEYS}
    found = from_fsdp(
        {name: section[name][1] for name in known},
        WHERE,
        machines,
        table={name: FSDP_KEYS[key] for name, key in known.items()},
    )
    names = [f"FSDP_{key.upper()}" for key in FSDP_KEYS]
    vain = tuple(
        f"{WHERE}: {plain(name, 80)} has no effect: it is not a setting of FSDP that is known.{suggestion(name, names)}"
        for name in section
        if name not in known
    )
    return Translation(found.says, (*found.warnings, *vain), found.rows)


def _deepspeed(section: Mapping[str, tuple[str, str]]) -> Translation:
    own = {name: (key, value) for name, (key, value) in section.items() if key != FILE_KEY}
    found = translate(
        {name: DEEPSPEED_KEYS[key] for name, (key, _) in own.items()},
        {name: value for name, (_, value) in own.items()},
        WHERE,
    )
    says = finish(found)
    # Else it is read as a setting.
    if all(value == "none" for key, value in section.values() if key == FILE_KEY):
        stage = f"DeepSpeed's default, stage {DEFAULT_STAGE} (environment variable ACCELERATE_USE_DEEPSPEED)"
        says.setdefault("zero", SettingValue(DEFAULT_STAGE, stage))
    return Translation(says, found.warnings, found.rows)
