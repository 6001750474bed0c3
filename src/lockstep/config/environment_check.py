"""Everything that is wrong with the environment, for people who ask; a run stops at the first."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.config.elsewhere import asked_by_environment
from lockstep.config.place import Environ
from lockstep.config.settings import OF_WORKERS
from lockstep.config.sources import (
    CONFIG_VARIABLE,
    control_link,
    inherited_environment,
    named_config_file,
    process_environment,
    said_by_environment,
    unknown_variables,
)
from lockstep.errors import ConfigError


def problems_of_environment(environ: Environ | None = None) -> list[str]:
    """A sentence for each variable that a run would refuse or ignore."""
    environ = inherited_environment() if environ is None else environ

    def config_file() -> None:
        path = named_config_file(environ)
        if path is not None:
            from lockstep.config.accelerate import load  # here, because it needs pydantic

            try:
                load(path)
            except ConfigError as error:
                raise ConfigError(f"{CONFIG_VARIABLE}: {error}") from None

    checks: list[Callable[[], object]] = [
        *(lambda one=one: said_by_environment(one, environ) for one in OF_WORKERS.values()),
        config_file,
        lambda: process_environment(environ),
        lambda: control_link(environ),
        lambda: asked_by_environment(environ, machines=1),
    ]
    found = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            found.append(str(error))
    return [*found, *unknown_variables(environ)]
