"""Where settings come from: code > environment (which carries flags and file) > default.

The only reader of ``os.environ`` in the package. Imports neither torch nor pydantic, because every
worker reads this first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.place import Environ, ProcessEnvironment, place_in
from lockstep.config.regular_file import check_readable
from lockstep.config.settings import OF_WORKERS, Setting
from lockstep.config.values import (
    SettingValue,
    parse_bool,
    parse_endpoint,
    parse_integer,
    plain,
    suggestion,
)
from lockstep.errors import ConfigError


def process_environment(environ: Environ | None = None, need_rendezvous: bool = True) -> ProcessEnvironment:
    """See ``place_in``; by default of this process's environment."""
    return place_in(os.environ if environ is None else environ, need_rendezvous)


@dataclass(frozen=True)
class ControlLink:
    """Where a worker finds the hub of its launch; ``round`` counts the restarts."""

    host: str
    port: int
    secret_hex: str = field(repr=False)
    round: int = 0


def control_link(environ: Environ | None = None) -> ControlLink | None:
    """What the launcher said, if it is one of ours.

    Raises:
        ConfigError: a variable is malformed.
    """
    environ = os.environ if environ is None else environ
    address, secret = environ.get("LOCKSTEP_CONTROL"), environ.get("LOCKSTEP_CONTROL_SECRET")
    path = environ.get("LOCKSTEP_CONTROL_FILE")
    if not address or not (secret or path):
        return None
    if not secret:
        try:
            secret = Path(path or "").read_text(encoding="ascii")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"LOCKSTEP_CONTROL_FILE={path} cannot be read: {reason}. It is set by `lockstep launch` and goes with "
                f"it: unset it and LOCKSTEP_CONTROL."
            ) from None
    try:
        host, port = parse_endpoint(address)
    except ConfigError as error:
        raise ConfigError(f"LOCKSTEP_CONTROL={error}. It is set by `lockstep launch`: unset it.") from None
    return ControlLink(
        host,
        port,
        secret,
        parse_integer(environ.get("LOCKSTEP_RESTART") or 0, "LOCKSTEP_RESTART", at_least=0),
    )


# -- settings of a worker ----------------------------------------------------------------------------


def worker_settings(
    code: Mapping[str, Any] | None = None, environ: Environ | None = None
) -> dict[str, SettingValue]:
    """What an ``Accelerator`` needs: ``code`` (None says nothing), the environment and the defaults, merged.

    Raises:
        ConfigError: a value is not allowed, or ``code`` has a name that is not a setting.
    """
    environ = os.environ if environ is None else environ
    code = code or {}
    for name in code:
        if name not in OF_WORKERS:
            raise ConfigError(f"{name!r} is not a setting of a worker.{suggestion(name, OF_WORKERS)}")
    settings: dict[str, SettingValue] = {}
    for name, setting in OF_WORKERS.items():
        if code.get(name) is not None:
            value = setting.kind.for_worker(code[name], f"Accelerator({name}=...)")
            settings[name] = SettingValue(value, "code")
        else:
            settings[name] = said_by_environment(setting, environ) or SettingValue(setting.default, "default")
    return settings


def said_by_environment(setting: Setting, environ: Environ) -> SettingValue | None:
    """What the environment says of a setting; None: nothing, as an empty variable does.

    Raises:
        ConfigError: a variable is blank, or its value is not allowed.
    """
    variable = next((variable for variable in setting.variables if environ.get(variable)), None)
    if variable is None:
        return None
    if not environ[variable].strip():
        raise ConfigError(f"{variable} is blank. Give it a value, or unset it.")
    value = setting.kind.for_worker(environ[variable], variable)
    return SettingValue(value, f"environment variable {variable}")


# what `accelerate launch` tells its workers, by the names of its file
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


def accelerate_sections(environ: Environ | None = None) -> dict[str, dict[str, tuple[str, str]]]:
    """The sections ``fsdp_config`` and ``deepspeed_config`` that ``accelerate launch`` put into the environment.

    Each is a mapping from variables to their (key, value).
    """
    environ = os.environ if environ is None else environ
    sections: dict[str, dict[str, tuple[str, str]]] = {}
    if environ.get("ACCELERATE_USE_FSDP") and parse_bool(
        environ["ACCELERATE_USE_FSDP"], "ACCELERATE_USE_FSDP"
    ):
        words = {name: value for name, value in environ.items() if name.startswith("FSDP_")}
        # it always sets both, and the version says which one counts
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
            section.pop("ACCELERATE_DEEPSPEED_ZERO_STAGE", None)  # the file says it
        sections["deepspeed_config"] = section
    return sections


OTHER_VARIABLES = (
    "LOCKSTEP_CONFIG_FILE",
    "LOCKSTEP_SECRET",
    "LOCKSTEP_CONTROL",
    "LOCKSTEP_CONTROL_SECRET",
    "LOCKSTEP_RESTART",
    "LOCKSTEP_LAUNCH_ID",
    "LOCKSTEP_SHARED_CONSOLE",
    "LOCKSTEP_CONTROL_FILE",
    "LOCKSTEP_ORPHAN_WATCH",
)


def unknown_variables(environ: Environ | None = None) -> tuple[str, ...]:
    """A sentence for each variable that has our prefix, and that nothing reads."""
    environ = os.environ if environ is None else environ
    known = {*OTHER_VARIABLES, *(name for setting in OF_WORKERS.values() for name in setting.variables)}
    return tuple(
        f"{plain(name, 80)} has no effect: it is not a variable that Lockstep reads.{suggestion(name, known)}"
        for name in sorted(environ)
        if name.startswith("LOCKSTEP_") and name not in known
    )


CONFIG_VARIABLE = "LOCKSTEP_CONFIG_FILE"

# -- other reads of the environment --------------------------------------------------------------------


def error_file(environ: Environ | None = None) -> str | None:
    """The file in which the elastic agent expects this worker's error, if there is an agent."""
    return (os.environ if environ is None else environ).get("TORCHELASTIC_ERROR_FILE") or None


def named_config_file(environ: Environ | None = None) -> str | None:
    """The file that LOCKSTEP_CONFIG_FILE names, if it names one.

    Raises:
        ConfigError: it cannot be read.
    """
    environ = os.environ if environ is None else environ
    path = environ.get(CONFIG_VARIABLE)
    if not path:
        return None
    if not path.strip():
        raise ConfigError(f"{CONFIG_VARIABLE} is blank. Give it a value, or unset it.")
    check_readable(path, CONFIG_VARIABLE)
    return os.path.expanduser(path)


def is_launched(environ: Environ | None = None) -> bool:
    """Whether a launcher of ours started this process, and so has read the configuration file."""
    return bool((os.environ if environ is None else environ).get("LOCKSTEP_LAUNCH_ID"))


def shares_console(environ: Environ | None = None) -> bool:
    """Whether the launcher said that all ranks of this machine write their errors to one console."""
    return (os.environ if environ is None else environ).get("LOCKSTEP_SHARED_CONSOLE") == "1"


def user_config_file(environ: Environ | None = None) -> Path:
    """Where `lockstep config` writes: LOCKSTEP_CONFIG_FILE, or config.yaml in the user's configuration folder."""
    environ = os.environ if environ is None else environ
    if environ.get("LOCKSTEP_CONFIG_FILE"):
        return Path(os.path.expanduser(environ["LOCKSTEP_CONFIG_FILE"]))  # keeps ~nobody, and raises nothing
    return user_config_folder(environ) / "config.yaml"


def user_config_folder(environ: Environ | None = None) -> Path:
    """Where this user's files for Lockstep are; relative when the user has no home."""
    base = (os.environ if environ is None else environ).get("XDG_CONFIG_HOME")
    return Path(base or os.path.expanduser("~/.config")) / "lockstep"


def inherited_environment() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def export_environment(values: Mapping[str, str]) -> None:
    """Set variables for this process and the processes that it starts."""
    os.environ.update(values)


def restore_environment(values: Mapping[str, str]) -> None:
    """Make this process's environment equal to an earlier copy."""
    for name in set(os.environ) - set(values):
        del os.environ[name]
    os.environ.update(values)
