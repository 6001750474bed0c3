"""Writing a configuration file that :func:`lockstep.compat.accelerate.config_file.load` reads back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from lockstep.compat.accelerate.config_file import from_yaml
from lockstep.config.parallel import Parallel
from lockstep.config.world import BatchSizes, fitted
from lockstep.config.yaml_file import YamlFile
from lockstep.errors import ConfigError


def write_config(path: Path, answers: Mapping[str, object]) -> None:
    """Check the answers as a file would be checked, then write them.

    Raises:
        ConfigError: an answer is not valid, or the file cannot be written.
    """
    config = from_yaml(YamlFile(str(path), dict(answers))).config
    if config.parallel is not None and config.num_processes is not None:
        fitted(Parallel.parse(config.parallel), BatchSizes(), config.num_processes)
    settings = config.model_dump(mode="json", exclude_unset=True)
    write_text(path, "# For `lockstep launch`; every key is also one of its flags.\n" + as_yaml(settings))


def as_yaml(settings: Mapping[str, object]) -> str:
    """Return settings as lines of YAML, in their order."""
    return yaml.safe_dump(dict(settings), sort_keys=False)


def write_text(path: Path, text: str) -> None:
    """Write a file, and the folders above it.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be written: {reason}. Name another file.") from None
