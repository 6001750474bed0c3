"""The secret that the machines of one launch share, where one launcher starts them all."""

from __future__ import annotations

from pathlib import Path

from lockstep.config.sources import inherited_environment
from lockstep.control import Secret, new_secret, read_secret
from lockstep.launch.plan import LaunchPlan


def check_secret_file(plan: LaunchPlan) -> None:
    """Raise ConfigError if the file that is to hold the secret does not, also where it would never be read."""
    # Which refuse it by themselves.
    if plan.secret_file is not None and plan.reach.backend not in (
        "k8s",
        "ray",
    ):
        read_secret(Path(plan.secret_file).expanduser())


def secret_for_machines(plan: LaunchPlan) -> Secret:
    """That of ``secret_file`` or of LOCKSTEP_SECRET; otherwise a fresh one, which this launcher hands to all.

    Raises:
        ConfigError: it is malformed, or the file cannot be read or is open to others.
    """
    if plan.secret_file is not None:
        return read_secret(Path(plan.secret_file).expanduser())
    said = inherited_environment().get("LOCKSTEP_SECRET")
    return Secret.from_hex(said) if said else new_secret()
