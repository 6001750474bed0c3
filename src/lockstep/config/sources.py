"""Where settings come from: code > environment (which carries flags and file) > default.

The only reader of ``os.environ`` in the package, beside ``launch/bare.py``, which runs without it. Imports neither
torch nor pydantic, because every worker reads this first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.config.files import check_readable
from lockstep.config.place import Environ, ProcessEnvironment, place_in
from lockstep.config.settings import OF_WORKERS, Setting
from lockstep.config.values import SettingValue, parse_bool, parse_endpoint, parse_integer, plain, suggestion
from lockstep.errors import ConfigError

CONFIG_VARIABLE = "LOCKSTEP_CONFIG_FILE"
"""The file that settings are read from, unless a command names one."""

# What processes of one launch tell each other on one machine. What launch/bare.py needs is spelled there
# again: it runs where this package cannot be imported.
SECRET_VARIABLE = "LOCKSTEP_SECRET"
"""The secret that the machines of a launch share, in hexadecimal digits."""
CONTROL_VARIABLE = "LOCKSTEP_CONTROL"
"""host:port of the coordinator."""
CONTROL_SECRET_VARIABLE = "LOCKSTEP_CONTROL_SECRET"
CONTROL_FILE_VARIABLE = "LOCKSTEP_CONTROL_FILE"
"""The secret by which workers speak to the coordinator, or the file that it is in."""
RESTART_VARIABLE = "LOCKSTEP_RESTART"
"""How often the workers have been started again."""
LAUNCH_ID_VARIABLE = "LOCKSTEP_LAUNCH_ID"
"""Marks every process of a launch."""
MEMORY_FOLDER_VARIABLE = "LOCKSTEP_MEMORY_FOLDER"
"""Where checkpoints in memory lie."""
LAUNCH_FOLDER_VARIABLE = "LOCKSTEP_LAUNCH_FOLDER"
"""Where the launch keeps its secret and the reports of errors."""
SHARED_CONSOLE_VARIABLE = "LOCKSTEP_SHARED_CONSOLE"
"""Whether all ranks of this machine write their errors to one console."""
ORPHAN_WATCH_VARIABLE = "LOCKSTEP_ORPHAN_WATCH"
"""Marks processes that end what a killed launcher has left."""

OTHER_VARIABLES = (
    CONFIG_VARIABLE,
    SECRET_VARIABLE,
    CONTROL_VARIABLE,
    CONTROL_SECRET_VARIABLE,
    CONTROL_FILE_VARIABLE,
    RESTART_VARIABLE,
    LAUNCH_ID_VARIABLE,
    MEMORY_FOLDER_VARIABLE,
    LAUNCH_FOLDER_VARIABLE,
    SHARED_CONSOLE_VARIABLE,
    ORPHAN_WATCH_VARIABLE,
)
"""All variables of ours that stand for no setting."""


def process_environment(environ: Environ | None = None, need_rendezvous: bool = True) -> ProcessEnvironment:
    """See ``place_in``; by default of this process's environment."""
    return place_in(os.environ if environ is None else environ, need_rendezvous)


@dataclass(frozen=True)
class ControlEndpoint:
    """Where a worker finds the coordinator of its launch; ``round`` counts the restarts."""

    host: str
    port: int
    secret_hex: str = field(repr=False)
    round: int = 0


def control_endpoint(environ: Environ | None = None) -> ControlEndpoint | None:
    """Return what the launcher said, if it is one of ours.

    Raises:
        ConfigError: a variable is malformed.
    """
    environ = os.environ if environ is None else environ
    address, secret = environ.get(CONTROL_VARIABLE), environ.get(CONTROL_SECRET_VARIABLE)
    path = environ.get(CONTROL_FILE_VARIABLE)
    if not address or not (secret or path):
        return None
    if not secret:
        try:
            secret = Path(path or "").read_text(encoding="ascii")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"{CONTROL_FILE_VARIABLE}={path} cannot be read: {reason}. Only `lockstep launch` sets it, for its "
                f"own processes. Unset it and {CONTROL_VARIABLE}."
            ) from None
    try:
        host, port = parse_endpoint(address)
    except ConfigError as error:
        raise ConfigError(
            f"{CONTROL_VARIABLE}={error}. Only `lockstep launch` sets it, for its own processes. Unset it."
        ) from None
    return ControlEndpoint(
        host,
        port,
        secret,
        parse_integer(environ.get(RESTART_VARIABLE) or 0, RESTART_VARIABLE, at_least=0),
    )


# -- settings of a worker ----------------------------------------------------------------------------


def worker_settings(
    code: Mapping[str, object] | None = None, environ: Environ | None = None
) -> dict[str, SettingValue]:
    """Return what an ``Accelerator`` needs: ``code`` (None says nothing), the environment and the defaults, merged.

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
            value = setting.kind.for_worker(code[name], f"Accelerator(...): {name}")
            settings[name] = SettingValue(value, "code")
        else:
            settings[name] = given_by_environment(setting, environ) or SettingValue(
                setting.default, "default"
            )
    return settings


def given_by_environment(setting: Setting, environ: Environ) -> SettingValue | None:
    """Return what the environment says of a setting; None: nothing, as an empty variable does.

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


def speaks_accelerate(environ: Environ | None = None) -> bool:
    """Return whether `accelerate launch` told this process of FSDP or DeepSpeed."""
    environ = os.environ if environ is None else environ
    return any(environ.get(name) for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"))


def unknown_variables(environ: Environ | None = None) -> tuple[str, ...]:
    """Return a sentence for each variable that has our prefix, and that nothing reads."""
    environ = os.environ if environ is None else environ
    known = {*OTHER_VARIABLES, *(name for setting in OF_WORKERS.values() for name in setting.variables)}
    return tuple(
        f"{plain(name, 80)} has no effect: Lockstep does not read a variable of this "
        f"name.{suggestion(name, known)}"
        for name in sorted(environ)
        if name.startswith("LOCKSTEP_") and name not in known
    )


TELLING = (
    "LOCKSTEP_",
    "ACCELERATE_",
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "CUDA_",
)
SECRETS = ("SECRET", "TOKEN", "PASSWORD", "KEY")


def telling_variables(environ: Environ | None = None) -> dict[str, str]:
    """Return the variables that change how a run computes or communicates, without those that name a secret."""
    environ = os.environ if environ is None else environ
    return {
        name: plain(value, 500)
        for name, value in sorted(environ.items())
        if name.startswith(TELLING) and not any(word in name for word in SECRETS)
    }


# -- other reads of the environment --------------------------------------------------------------------


DEVICE_VARIABLE = "ACCELERATE_TORCH_DEVICE"


def named_device(environ: Environ | None = None) -> str | None:
    """Return the device that ACCELERATE_TORCH_DEVICE names, as torch writes it."""
    return (os.environ if environ is None else environ).get(DEVICE_VARIABLE) or None


def named_backend(environ: Environ | None = None) -> str | None:
    """Return the backend that the environment names for CPU tensors.

    Raises:
        ConfigError: it is none of those that there are.
    """
    given = given_by_environment(OF_WORKERS["backend"], os.environ if environ is None else environ)
    return None if given is None else str(given.value)


def error_file(environ: Environ | None = None) -> str | None:
    """Return the file in which the elastic agent expects this worker's error, if there is an agent."""
    return (os.environ if environ is None else environ).get("TORCHELASTIC_ERROR_FILE") or None


def named_config_file(environ: Environ | None = None) -> str | None:
    """Return the file that LOCKSTEP_CONFIG_FILE names, if it names one.

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
    """Return whether a launcher of ours started this process, and so has read the configuration file."""
    return bool((os.environ if environ is None else environ).get(LAUNCH_ID_VARIABLE))


def memory_folder(environ: Environ | None = None) -> str | None:
    """Return where the launcher said that checkpoints in memory lie; None where no launcher keeps them."""
    return (os.environ if environ is None else environ).get(MEMORY_FOLDER_VARIABLE) or None


def shares_console(environ: Environ | None = None) -> bool:
    """Return whether the launcher said that all ranks of this machine write their errors to one console."""
    return (os.environ if environ is None else environ).get(SHARED_CONSOLE_VARIABLE) == "1"


def user_config_file(environ: Environ | None = None) -> Path:
    """Return where `lockstep config` writes: LOCKSTEP_CONFIG_FILE, or config.yaml in the user's configuration
    folder."""
    environ = os.environ if environ is None else environ
    if environ.get(CONFIG_VARIABLE):
        return Path(os.path.expanduser(environ[CONFIG_VARIABLE]))  # keeps ~nobody, and raises nothing
    return user_config_folder(environ) / "config.yaml"


def user_config_folder(environ: Environ | None = None) -> Path:
    """Return where this user's files for Lockstep are; relative when the user has no home."""
    base = (os.environ if environ is None else environ).get("XDG_CONFIG_HOME")
    return Path(base or os.path.expanduser("~/.config")) / "lockstep"


def accelerate_config_file(environ: Environ | None = None) -> Path:
    """Return where `accelerate config` writes: in the cache of Hugging Face."""
    environ = os.environ if environ is None else environ
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(os.path.expanduser(home)) / "accelerate" / "default_config.yaml"


def inherited_environment() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def export_environment(values: Mapping[str, str]) -> None:
    """Set variables for this process and the processes that it starts."""
    os.environ.update(values)


def restore_environment(values: Mapping[str, str]) -> None:
    """Make this process's environment equal to an earlier copy."""
    for name in set(os.environ) - set(values):
        del os.environ[name]
    os.environ.update(values)


@contextmanager
def patch_environment(**variables: object) -> Iterator[None]:
    """Set environment variables inside of the block. Afterwards they have their values from before.

    Args:
        variables: Names and values. Names are written in upper case, and values as text.

    Examples:
        ```python
        import os
        from lockstep.utils import patch_environment

        with patch_environment(omp_num_threads=1):
            assert os.environ["OMP_NUM_THREADS"] == "1"
        ```
    """
    before = inherited_environment()
    names = [name.upper() for name in variables]
    export_environment({name: str(value) for name, value in zip(names, variables.values(), strict=True)})
    try:
        yield
    finally:
        after = {name: value for name, value in inherited_environment().items() if name not in names}
        restore_environment(after | {name: before[name] for name in names if name in before})


@contextmanager
def clear_environment() -> Iterator[None]:
    """Remove all environment variables inside of the block. Afterwards the process has those from before.

    Examples:
        ```python
        import os
        from lockstep.utils import clear_environment

        before = dict(os.environ)
        with clear_environment():
            assert "PATH" not in os.environ
        assert dict(os.environ) == before
        ```
    """
    before = inherited_environment()
    restore_environment({})
    try:
        yield
    finally:
        restore_environment(before)


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 for words such as ``yes``, ``true`` and ``on``, and 0 for words such as ``no``, ``false`` and ``off``.

    Args:
        value: The word, in any case.
        to_bool: Return True and False, not 1 and 0.

    Raises:
        ValueError: ``value`` is another word.

    Examples:
        ```python
        from lockstep.utils import str_to_bool

        assert str_to_bool("yes") == 1
        assert str_to_bool("off", to_bool=True) is False
        ```
    """
    truth = parse_bool(value, "value")
    return truth if to_bool else int(truth)
