"""Functions of ``accelerate.commands`` that other libraries call, on our commands."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import click
import yaml

from lockstep.cli.main import cli
from lockstep.compat.accelerate.config_file import load
from lockstep.config.enums import PrecisionType
from lockstep.config.files import JsonObject
from lockstep.config.sources import user_config_file
from lockstep.errors import ConfigError

default_config_file = str(user_config_file())
"""Where ``lockstep config`` writes."""

_FIXED = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "NO",
    "machine_rank": 0,
    "mixed_precision": "no",
    "num_machines": 1,
    "use_cpu": False,
}


class FileSettings:
    """The settings of a configuration file, as they are written, with what Accelerate takes where it says nothing."""

    def __init__(self, settings: dict[str, object]) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> object:
        if name.startswith("_") or name not in self._settings:
            raise AttributeError(name)
        return self._settings[name]

    def to_dict(self) -> JsonObject:
        return dict(self._settings)


def load_config_from_file(config_file: str | None) -> FileSettings:
    """Read a configuration file, checked; None: the one that ``lockstep config`` wrote.

    Raises:
        ConfigError: it cannot be read, or is no configuration.
    """
    path = Path(config_file or user_config_file())
    load(path)
    settings: dict[str, object] = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    # YAML reads an unquoted NO as false.
    return FileSettings({**_FIXED, **settings, "distributed_type": settings.get("distributed_type") or "NO"})


def write_basic_config(mixed_precision: str = "no", save_location: str = default_config_file) -> Path | bool:
    """Write a configuration file that uses all accelerators of this machine, or its CPU.

    Args:
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        save_location: The path of the file.

    Returns:
        The path. False: the file exists already, and was left as it is.

    Raises:
        ConfigError: ``mixed_precision`` is unknown.

    Examples:
        ```python
        from pathlib import Path
        from lockstep.utils import write_basic_config

        Path("basic.yaml").unlink(missing_ok=True)
        assert write_basic_config("bf16", save_location="basic.yaml") == Path("basic.yaml")
        assert write_basic_config("bf16", save_location="basic.yaml") is False  # it exists
        ```
    """
    path = Path(save_location)
    if path.exists():
        return False
    precision = mixed_precision.lower()
    if precision not in PrecisionType.list():
        raise ConfigError(
            f"mixed_precision is {mixed_precision!r}, but must be one of {', '.join(PrecisionType.list())}. Use one."
        )
    import torch

    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    settings = {
        **_FIXED,
        "distributed_type": "MULTI_GPU" if count > 1 else "NO",
        "mixed_precision": precision,
        "num_processes": max(1, count),
        "use_cpu": count == 0,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


class LaunchParser(argparse.ArgumentParser):
    """Reads the words of a launch into attributes with Accelerate's names; ``lockstep launch`` reads them again."""

    def __init__(self) -> None:
        super().__init__("lockstep launch", add_help=False)
        self.add_argument("words", nargs=argparse.REMAINDER)

    def format_help(self) -> str:
        from lockstep.cli.launch import command

        return command.get_help(click.Context(command, info_name="lockstep launch"))

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        namespace = argparse.Namespace() if namespace is None else namespace
        vars(namespace).update(_attributes(words), words=words)
        return namespace, []


def _attributes(words: Sequence[str]) -> dict[str, object]:
    """Return what the words say, by Accelerate's names; what they do not say is None, and False of switches."""
    from lockstep.cli.launch import command

    given = command.make_context("launch", list(words), resilient_parsing=True).params
    switches = {one.name for one in command.params if getattr(one, "is_flag", False)}
    found: JsonObject = {
        one.name: given.get(one.name) or (False if one.name in switches else given.get(one.name))
        for one in command.params
        if one.name is not None and one.expose_value
    }
    found["cpu"] = found["use_cpu"]
    found["training_script"] = found.pop("script")
    found["training_script_args"] = list(found.pop("arguments") or ())
    return found


def launch_command_parser(subparsers: object = None) -> LaunchParser:
    """Return what reads the words that ``launch_command`` gets."""
    if subparsers is not None:
        raise ConfigError(
            "The options of `lockstep launch` cannot be added to another command. Call `lockstep launch` itself."
        )
    return LaunchParser()


def launch_command(args: argparse.Namespace) -> None:
    """Run what the words say, in processes of their own; ``import accelerate`` means this library there.

    Raises:
        ConfigError: a setting is not allowed, or an attribute of ``args`` was changed after the words were read.
        subprocess.CalledProcessError: a process of the run failed.
    """
    for name, value in _attributes(args.words).items():
        now = getattr(args, name, value)
        if now != value:
            raise ConfigError(
                f"args.{name} was changed from {value!r} to {now!r} after the arguments were parsed, which has "
                "no effect. Pass it among the arguments that are parsed."
            )
    words = ["launch", "--as-accelerate", *args.words]
    with redirect_stdout(io.StringIO()):  # raises here what is wrong with them
        cli.main(args=[*words[:2], "--dry-run", *words[2:]], prog_name="lockstep", standalone_mode=False)
    run_command(words)


def run_command(words: Sequence[str]) -> None:
    """Run ``lockstep`` with these words in a process of its own, since a launch ends the process that it is called in.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    subprocess.run([sys.executable, "-m", "lockstep.cli.main", *words], check=True)
