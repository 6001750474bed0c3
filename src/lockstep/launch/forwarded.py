"""Which environment variables travel to other machines: an allow-list, because anything else may be a secret."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from lockstep.errors import ConfigError
from lockstep.launch.backend import SECRET

PREFIXES = ("LOCKSTEP_", "NCCL_", "GLOO_", "TORCH_")
NAMES = frozenset(
    {
        "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
        "PYTHONPATH",
        "PYTHONUNBUFFERED",
        "VIRTUAL_ENV",
        "PATH",
        "LANG",
        "LC_ALL",
    }
)
# what one process of ours tells another on the same machine
OWN_MACHINE = frozenset(
    {
        "LOCKSTEP_CONFIG_FILE",
        "LOCKSTEP_CONTROL",
        "LOCKSTEP_CONTROL_FILE",
        "LOCKSTEP_LAUNCH_ID",
        "LOCKSTEP_RESTART",
        "LOCKSTEP_SHARED_CONSOLE",
    }
)
SECRET_WORDS = re.compile(r"TOKEN|SECRET|KEY|PASSW|CREDENTIAL", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether the value of a variable with this name is not to be shown or kept."""
    return SECRET_WORDS.search(name) is not None


def travels(name: str) -> bool:
    """Whether a variable goes along without being named."""
    if is_secret(name) or name in OWN_MACHINE:
        return False
    return name in NAMES or name.startswith(PREFIXES)


def forwarded(environ: Mapping[str, str], further: Iterable[str] = ()) -> dict[str, str]:
    """The variables that travel; ``further`` are names that the user wants, secrets among them or not.

    Raises:
        ConfigError: a name that the user wants is not set.
    """
    names = [name for name in environ if travels(name)]
    for name in further:
        if name not in environ:
            raise ConfigError(f"forward_env names {name}, which is not set here. Set it, or remove the name.")
        names.append(name)
    return {name: environ[name] for name in sorted(set(names))}


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The same for people: the values of secrets are not there."""
    return {name: SECRET if is_secret(name) else value for name, value in environment.items()}
