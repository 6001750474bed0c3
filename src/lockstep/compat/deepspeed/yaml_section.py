"""The section of Accelerate's YAML for DeepSpeed, in our settings."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.compat.deepspeed.config import finish, from_deepspeed
from lockstep.compat.deepspeed.keys import KEYS
from lockstep.compat.rules import NoEffect, Refused, Table, Translation, Used, same, translate
from lockstep.config import readers as read
from lockstep.config.merge import merge_settings
from lockstep.config.parallel_words import PARSERS
from lockstep.config.values import SettingValue, repr_short
from lockstep.errors import ConfigError

META = "a model is made as the script makes it; one made on the meta device is filled shard by shard"

# DeepSpeed's launchers -> the setting that does the same; with the first two a machine starts only itself
MULTINODE_LAUNCHERS: dict[str, dict[str, bool]] = {
    "standard": {},
    "nossh": {},
    "pdsh": {},
    "openmpi": {"mpi": True},
    "slurm": {"slurm": True},
}
ONE_MACHINE = ("standard", "nossh")


def _launcher(value: object, key: str) -> dict[str, bool]:
    """Return the settings of one of DeepSpeed's launchers."""
    if value in (None, "", "none"):
        return {}
    if value not in MULTINODE_LAUNCHERS:
        raise ConfigError(
            f"{key}={repr_short(value)} is not available. Use one of {', '.join(MULTINODE_LAUNCHERS)}."
        )
    return MULTINODE_LAUNCHERS[value]


def file_name(value: object, key: str) -> str | None:
    if value in ("", "none"):
        return None
    if not isinstance(value, str) or "\0" in value:
        raise ConfigError(f"{key}={repr_short(value)} is not a path. Give the name of a file.")
    return value


LAUNCHER_KEY, HOSTFILE_KEY = "deepspeed_multinode_launcher", "deepspeed_hostfile"

# Accelerate's own names, in its file and its plugin
DEEPSPEED_KEYS: Table = {
    "zero_stage": Used("zero", PARSERS["zero"]),
    "offload_optimizer_device": Used("optimizer_device", read.offload_device),
    "offload_param_device": Used("param_device", read.offload_device),
    "offload_optimizer_nvme_path": Used("optimizer_folder", read.folder),
    "offload_param_nvme_path": Used("param_folder", read.folder),
    "gradient_accumulation_steps": same("gradient_accumulation_steps"),
    "gradient_clipping": same("gradient_clipping"),
    "seq_parallel_communication_data_type": KEYS["seq_parallel_communication_data_type"],
    "zero3_init_flag": NoEffect(META),
    "zero3_save_16bit_model": NoEffect(
        "save_model always writes whole weights", (True, False, "true", "false")
    ),
    "transformer_moe_cls_names": NoEffect("experts are sharded as all other blocks are"),
    "deepspeed_moe_layer_cls_names": NoEffect("experts are sharded as all other blocks are"),
    "enable_msamp": Refused("MS-AMP", instead="Remove it, and train in 8 bits by mixed_precision: fp8."),
    LAUNCHER_KEY: Used("", _launcher),
    HOSTFILE_KEY: Used("hostfile", file_name),
    **dict.fromkeys(
        ("deepspeed_inclusion_filter", "deepspeed_exclusion_filter"),
        Refused("a part of the hosts", ("", "none"), "Remove it, and list those hosts in the hostfile."),
    ),
}
FILE_KEY = "deepspeed_config_file"
DEFAULT_STAGE = 2


def from_deepspeed_section(section: Mapping[str, object], where: str) -> Translation:
    """Translate the section ``deepspeed_config``; the file that it names must agree with its other keys.

    Raises:
        ConfigError: a key is unknown or refused, or the file contradicts another key.
    """
    own = translate(DEEPSPEED_KEYS, {key: value for key, value in section.items() if key != FILE_KEY}, where)
    _check_launcher(own.settings, section, where)
    settings = finish(own)
    path = section.get(FILE_KEY)
    if path in (None, "none", ""):
        settings.setdefault(
            "zero", SettingValue(DEFAULT_STAGE, f"DeepSpeed's default, stage {DEFAULT_STAGE} ({where})")
        )
        return Translation(settings, own.warnings)
    if not isinstance(path, str):
        raise ConfigError(f"{where}: {FILE_KEY} is not a path. Give the name of a JSON file.")
    # Only to see whether they agree: workers read the file themselves.
    merge_settings(settings, from_deepspeed(path).settings)
    settings[FILE_KEY] = SettingValue(path, f"{FILE_KEY}={path} ({where})")
    return Translation(settings, own.warnings)


def _check_launcher(settings: Mapping[str, SettingValue], section: Mapping[str, object], where: str) -> None:
    """Raise ConfigError when the launcher and the list of hosts do not belong together."""
    launcher = section.get(LAUNCHER_KEY)
    listed = next((name for name in ("hostfile", "mpi") if name in settings), None)
    if launcher in ONE_MACHINE and listed is not None:
        raise ConfigError(
            f"{where}: {LAUNCHER_KEY}={launcher} starts one machine, which contradicts {settings[listed].source}. "
            f"Remove one of them."
        )
    if "hostfile" not in settings and (launcher == "pdsh" or listed is not None):
        raise ConfigError(
            f"{where}: {LAUNCHER_KEY}={launcher or 'pdsh'} needs {HOSTFILE_KEY}, a file with lines such as "
            f"host1 slots=8. Name one, or set {LAUNCHER_KEY}: standard and run one command on each machine."
        )
    if launcher == "slurm" and "hostfile" in settings:
        raise ConfigError(
            f"{where}: {settings['hostfile'].source} contradicts {LAUNCHER_KEY}=slurm. Remove one of them."
        )
