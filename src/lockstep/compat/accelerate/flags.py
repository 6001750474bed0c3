"""The options of ``accelerate launch`` for sharding and for mpirun, from the tables that also read its file."""

from __future__ import annotations

from lockstep.compat.accelerate import sections
from lockstep.compat.deepspeed import section as deepspeed
from lockstep.compat.fsdp import section as fsdp
from lockstep.compat.rules import Translation
from lockstep.config.merge import (
    joined_sources,
    merge_settings,
    parallel_of,
    parallel_sources,
    values_of_settings,
)
from lockstep.config.settings import SETTINGS
from lockstep.config.values import SettingValue

FSDP_FLAGS = tuple(fsdp.PREFIX + key for key in fsdp.KEYS)
DEEPSPEED_FLAGS = tuple(key for key in deepspeed.DEEPSPEED_KEYS if key not in SETTINGS)
LAYOUT_FLAGS = tuple(sections.LAYOUT_PREFIX + key for key in sections.LAYOUT_KEYS)
MPI_FLAGS = tuple(sections.MPI_KEYS)
FOREIGN_FLAGS = (*FSDP_FLAGS, *DEEPSPEED_FLAGS, *LAYOUT_FLAGS, *MPI_FLAGS)
FOREIGN_SWITCHES = ("use_fsdp", "use_deepspeed", "use_parallelism_config")
# Refused by name, not as unknown: what does not exist here yet.
LATER_SWITCHES = {"use_megatron_lm": "Megatron-LM settings", "tpu": "training on TPUs"}
UNUSED_SWITCHES = ("same_network", "quiet")


def spread_settings(
    given: dict[str, SettingValue], options: dict[str, object]
) -> tuple[dict[str, SettingValue], tuple[str, ...]]:
    """The settings that these options mean, and warnings; ``given`` are the other flags.

    Raises:
        ConfigError: a value is not allowed, or flags contradict each other.
    """
    machines = given["num_machines"].value if "num_machines" in given else 1
    parts: list[Translation] = []
    section = _given(options, FSDP_FLAGS)
    if section or options["use_fsdp"]:
        parts.append(fsdp.from_fsdp(section, "flags --fsdp-*", machines))
    section = _given(options, DEEPSPEED_FLAGS)
    if section or options["use_deepspeed"]:
        section[deepspeed.FILE_KEY] = options[deepspeed.FILE_KEY]
        parts.append(deepspeed.from_deepspeed_section(section, "flags of DeepSpeed"))
    section = _given(options, LAYOUT_FLAGS)
    if section:
        parts.append(sections.from_layout(section, "flags --parallelism-config-*", alone=not parts))
    section = _given(options, MPI_FLAGS)
    if section:
        parts.append(sections.from_mpirun(section, "flags --mpirun-*"))
    if not parts:
        return {}, ()
    asked = merge_settings(*(part.settings for part in parts), _said_by_flags(given, machines))
    names = {"num_processes": "processes"} | {name: name for name in asked if name in SETTINGS}
    settings = {
        name: SettingValue(asked[said].value, asked[said].source)
        for name, said in names.items()
        if said in asked and name not in given and not (name == "num_processes" and "nproc" in given)
    }
    words = parallel_sources(asked)
    if words:
        settings["parallel"] = SettingValue(str(parallel_of(asked)), joined_sources(words), words)
    return settings, tuple(text for part in parts for text in part.warnings)


def _said_by_flags(given: dict[str, SettingValue], machines: int) -> dict[str, SettingValue]:
    asked = values_of_settings({name: (setting.value, setting.source) for name, setting in given.items()})
    for name, factor in (("num_processes", 1), ("nproc", machines)):
        if name in given:
            total = given[name].value * factor
            asked["processes"] = SettingValue(total, f"{total} processes ({given[name].source})")
    return asked


def _given(options: dict[str, object], names: tuple[str, ...]) -> dict[str, object]:
    return {name: options[name] for name in names if options[name] is not None}
