"""What is asked of an ``Accelerator`` in other libraries' words: plugins, a DeepSpeed JSON, Accelerate's variables.

``external_settings`` is all that ``Accelerator`` calls of this package, and only where one of these is there.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.compat.accelerate.sections import LAYOUT_KEYS, from_layout
from lockstep.compat.deepspeed.config import finish, from_deepspeed
from lockstep.compat.deepspeed.plugin import DeepSpeedPlugin
from lockstep.compat.deepspeed.plugin_settings import (
    from_deepspeed_plugin,
    is_of_trainer,
    named_plugins,
    stages_of,
)
from lockstep.compat.deepspeed.yaml_section import DEEPSPEED_KEYS, DEFAULT_STAGE, FILE_KEY
from lockstep.compat.fsdp.plugin_settings import check_fsdp_plugin, from_fsdp_plugin
from lockstep.compat.fsdp.section import KEYS as FSDP_KEYS
from lockstep.compat.fsdp.section import from_fsdp
from lockstep.compat.rules import Translation, translate
from lockstep.config.merge import ExternalSettings, merge_settings
from lockstep.config.place import Environ
from lockstep.config.sources import (
    CONFIG_VARIABLE,
    inherited_environment,
    is_launched,
    named_config_file,
    process_environment,
)
from lockstep.config.values import SettingValue, parse_bool, plain, suggestion
from lockstep.errors import ConfigError


def external_settings(
    config_file: str | None,
    fsdp_plugin: object,
    deepspeed_plugin: object,
    deepspeed_plugins: object,
    parallelism_config: object = None,
) -> ExternalSettings:
    """Everything that plugins, the JSON ``config_file`` and the variables of ``accelerate launch`` ask for.

    Warns of a configuration file that LOCKSTEP_CONFIG_FILE names where no launcher of ours has read it.

    Raises:
        ConfigError: one of them is not valid, or they contradict each other.
    """
    plugins = named_plugins(deepspeed_plugin, deepspeed_plugins)
    plugin = next(iter(plugins.values()), None)
    found: list[Translation] = []
    if check_fsdp_plugin(fsdp_plugin) is not None:
        found.append(from_fsdp_plugin(fsdp_plugin, _machines()))
    if plugin is not None:
        found.append(from_deepspeed_plugin(plugin))
    if len(found) == 2:
        raise ConfigError(
            f"fsdp_plugin ({_stage(found[0])}) and deepspeed_plugin ({_stage(found[1])}) were both given. Pass "
            "one of them."
        )
    if parallelism_config is not None:
        found.append(from_parallelism_config(parallelism_config, alone=not found))
    found_in_file: Mapping[str, SettingValue] = {}
    if config_file is not None:
        found.append(from_deepspeed(config_file))
        found_in_file = found[-1].settings
    found.append(environment_settings())
    warnings = dict.fromkeys([text for part in found for text in part.warnings] + _unread_file())
    shown = None if plugin is None or is_of_trainer(plugin) else plugin
    if plugin is None and config_file is not None and {"optimizer", "scheduler"} & found_in_file.keys():
        # Scripts ask the plugin whether the file describes them, and pass placeholders if it does.
        shown = DeepSpeedPlugin(config_file)
    settings = merge_settings(*(part.settings for part in found))
    return ExternalSettings(settings, tuple(warnings), shown, stages_of(plugins))


def from_parallelism_config(config: object, alone: bool = True) -> Translation:
    """Return the sizes of axes that an object with the fields of ``ParallelismConfig`` has.

    Raises:
        ConfigError: it has none of these fields, the sequence is split in two ways, or the ranks are not as many as
            there are processes.
    """
    section = {key: getattr(config, key, None) for key in LAYOUT_KEYS}
    section = {key: value for key, value in section.items() if value is not None}
    if not section:
        raise ConfigError(f"parallelism_config is of type {type(config).__name__}. Pass a ParallelismConfig.")
    found = from_layout(section, "parallelism_config", alone)
    settings = dict(found.settings)
    ranks = settings.pop("processes", None)
    here = process_environment(need_rendezvous=False).world_size
    if (1 if ranks is None else ranks.value) not in (1, here):
        assert ranks is not None
        raise ConfigError(
            f"parallelism_config describes {ranks.value} ranks ({ranks.source}), but this run has {here} "
            f"processes. Start {ranks.value} processes, or change the sizes."
        )
    return Translation(settings, found.warnings)


def _unread_file() -> list[str]:
    path = None if is_launched() else check_named_file()
    if path is None:
        return []
    return [
        f"{CONFIG_VARIABLE}={path} has no effect: only `lockstep launch` reads a configuration file. Start the script "
        f"with it, or unset {CONFIG_VARIABLE}."
    ]


def check_named_file(environ: Environ | None = None) -> str | None:
    """Return the configuration file that LOCKSTEP_CONFIG_FILE names.

    Raises:
        ConfigError: the file cannot be read, or is no configuration.
    """
    path = named_config_file(environ)
    if path is not None:
        # Here, because it needs pydantic.
        from lockstep.compat.accelerate.config_file import load

        try:
            load(path)
        except ConfigError as error:
            raise ConfigError(f"{CONFIG_VARIABLE}: {error}") from None
    return path


def _stage(part: Translation) -> str:
    stage = part.settings.get("zero")
    return stage.source if stage is not None else "no stage"


def _machines() -> int:
    here = process_environment(need_rendezvous=False)
    return max(1, here.world_size // here.local_world_size)


def environment_settings(
    environ: Mapping[str, str] | None = None, machines: int | None = None
) -> Translation:
    """Return what the variables of ``accelerate launch`` for FSDP and DeepSpeed ask for, by their names.

    ``machines``: of the run; None: as this process's place says.

    Raises:
        ConfigError: a value is not allowed, or they contradict each other.
    """
    sections = accelerate_sections(inherited_environment() if environ is None else environ)
    found = []
    if "fsdp_config" in sections:
        found.append(_fsdp(sections["fsdp_config"], _machines() if machines is None else machines))
    if "deepspeed_config" in sections:
        found.append(_deepspeed(sections["deepspeed_config"]))
    return Translation(
        merge_settings(*(part.settings for part in found)),
        tuple(text for part in found for text in part.warnings),
    )


# What `accelerate launch` tells its workers, by the names of its file.
DEEPSPEED_VARIABLES = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "offload_optimizer_nvme_path",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "offload_param_nvme_path",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "zero3_init_flag",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "zero3_save_16bit_model",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "deepspeed_moe_layer_cls_names",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config_file",
}
FSDP_VARIABLES = {"transformer_cls_to_wrap": "transformer_layer_cls_to_wrap"}


def accelerate_sections(environ: Environ) -> dict[str, dict[str, tuple[str, str]]]:
    """Return the sections ``fsdp_config`` and ``deepspeed_config`` that ``accelerate launch`` put into the environment.

    Each is a mapping from variables to their (key, value).
    """
    sections: dict[str, dict[str, tuple[str, str]]] = {}
    if environ.get("ACCELERATE_USE_FSDP") and parse_bool(
        environ["ACCELERATE_USE_FSDP"], "ACCELERATE_USE_FSDP"
    ):
        words = {name: value for name, value in environ.items() if name.startswith("FSDP_")}
        # It always sets both, and the version says which one counts.
        unused = "SHARDING_STRATEGY" if words.get("FSDP_VERSION") == "2" else "RESHARD_AFTER_FORWARD"
        words.pop(f"FSDP_{unused}", None)
        keys = {name: name.removeprefix("FSDP_").lower() for name in words}
        sections["fsdp_config"] = {
            name: (FSDP_VARIABLES.get(keys[name], keys[name]), value) for name, value in words.items()
        }
    name = "ACCELERATE_USE_DEEPSPEED"
    if environ.get(name) and parse_bool(environ[name], name):
        section = {
            variable: (key, environ[variable])
            for variable, key in DEEPSPEED_VARIABLES.items()
            if environ.get(variable)
        }
        if environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") not in (None, "", "none"):
            # The file says it.
            section.pop("ACCELERATE_DEEPSPEED_ZERO_STAGE", None)
        sections["deepspeed_config"] = section
    return sections


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
        f"{WHERE}: {plain(name, 80)} has no effect: it is not a known setting of FSDP.{suggestion(name, names)}"
        for name in section
        if name not in known
    )
    return Translation(found.settings, (*found.warnings, *vain))


def _deepspeed(section: Mapping[str, tuple[str, str]]) -> Translation:
    own = {name: (key, value) for name, (key, value) in section.items() if key != FILE_KEY}
    found = translate(
        {name: DEEPSPEED_KEYS[key] for name, (key, _) in own.items()},
        {name: value for name, (_, value) in own.items()},
        WHERE,
    )
    asked = finish(found)
    # Else it is read as a setting.
    if all(value == "none" for key, value in section.values() if key == FILE_KEY):
        stage = f"DeepSpeed's default, stage {DEFAULT_STAGE} (environment variable ACCELERATE_USE_DEEPSPEED)"
        asked.setdefault("zero", SettingValue(DEFAULT_STAGE, stage))
    return Translation(asked, found.warnings)
