"""Accelerate's commands as functions: ``X_command_parser()`` makes an argparse parser, ``X_command(args)`` runs it.

Parsers have the options of Accelerate's; the commands are those of ``lockstep accelerate``. Names of
``accelerate.commands``.
"""

from __future__ import annotations

import argparse
import importlib
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

from lockstep.cli.accelerate_commands import run_command
from lockstep.compat.accelerate.write import in_words_of_fsdp2
from lockstep.config.files import JsonObject
from lockstep.config.yaml_file import YamlFile, read_yaml
from lockstep.errors import ConfigError

DYNAMO_BACKENDS = [
    "EAGER", "AOT_EAGER", "INDUCTOR", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS", "OFI", "FX2TRT", "ONNXRT",
    "TENSORRT", "AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE", "TVM",
]  # fmt: skip
"""Words that files may have for backends of ``torch.compile``; ``launch`` knows whether torch has them."""

_CONFIG_FILE = ("--config_file", {"help": "The configuration file."})

SubParsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

OptionSettings: TypeAlias = dict[str, Any]
"""Arguments of ``add_argument`` and ``add_parser``, which take values of many types."""

# command -> where it is, and its options
COMMANDS: dict[str, tuple[str, list[tuple[str, OptionSettings]]]] = {
    "env": ("lockstep.cli.env:command", [_CONFIG_FILE]),
    "test": ("lockstep.cli.test:command", [_CONFIG_FILE]),
    "config": ("lockstep.cli.config:command", [_CONFIG_FILE]),
    "default": (
        "lockstep.cli.config:default_command",
        [_CONFIG_FILE, ("--mixed_precision", {"choices": ["no", "fp16", "bf16"], "default": "no"})],
    ),
    "update": ("lockstep.cli.config:update_command", [_CONFIG_FILE]),
    "merge-weights": (
        "lockstep.cli.accelerate:merge_weights",
        [
            ("checkpoint_directory", {"help": "What FSDP saved in shards."}),
            ("output_path", {"help": "The folder for the file."}),
            ("--unsafe_serialization", {"action": "store_true", "default": False}),
            ("--remove_checkpoint_dir", {"action": "store_true", "default": False}),
        ],
    ),
    "estimate-memory": (
        "lockstep.cli.accelerate:estimate_memory",
        [
            ("model_name", {"help": "A folder, a name on the Hub, or module:Class."}),
            ("--library_name", {"choices": ["timm", "transformers"]}),
            (
                "--dtypes",
                {
                    "nargs": "+",
                    "choices": ["float32", "float16", "int8", "int4"],
                    "default": ["float32", "float16", "int8", "int4"],
                },
            ),
            ("--trust_remote_code", {"action": "store_true", "default": False}),
        ],
    ),
    "to-fsdp2": (
        "lockstep.cli.accelerate:to_fsdp2",
        [
            ("--config_file", {"required": True}),
            ("--overwrite", {"action": "store_true", "default": False}),
            ("--output_file", {}),
        ],
    ),
}


class CustomArgumentParser(argparse.ArgumentParser):
    """A parser whose options are known with ``-`` and with ``_`` between their words.

    What a command line says is listed in the namespace's ``nondefault``.
    """

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        return super().add_argument(*_both_spellings(args), **_noted(kwargs))

    def add_argument_group(self, *args: Any, **kwargs: Any) -> argparse._ArgumentGroup:
        made = super().add_argument_group(*args, **kwargs)
        made.__class__ = CustomArgumentGroup
        return made


# The class that argparse gives its groups has a private name.
_ArgumentGroup: Any = type(argparse.ArgumentParser(add_help=False).add_argument_group())


class CustomArgumentGroup(_ArgumentGroup):
    """A group of options of a ``CustomArgumentParser``."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        return super().add_argument(*_both_spellings(args), **_noted(kwargs))


def _both_spellings(names: tuple[str, ...]) -> tuple[str, ...]:
    other = [f"--{name[2:].replace('_', '-')}" for name in names if name.startswith("--")]
    return tuple(dict.fromkeys([*names, *other]))


class _Noted(argparse.Action):
    """Stores a value, and notes that the command line has it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.is_flag = kwargs.pop("is_flag", False)
        super().__init__(*args, **kwargs)

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, True if self.is_flag else values)
        namespace.nondefault = {*getattr(namespace, "nondefault", ()), self.dest}


def _noted(options: dict[str, object]) -> OptionSettings:
    action = options.get("action", "store")
    if action == "store_true":
        return {"default": False, **options, "action": _Noted, "nargs": 0, "is_flag": True}
    return {**options, "action": _Noted} if action == "store" else options


class SubcommandHelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Leaves the words for a command's own arguments out of the line with the usage."""

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[argparse._MutuallyExclusiveGroup],
        prefix: str | None = None,
    ) -> None:
        super().add_usage(usage and usage.replace("<command> [<args>] ", ""), actions, groups, prefix)


def clean_option(option: str) -> str | None:
    """``--some-option`` as the name of its value, ``some_option``; None: it is no option."""
    if "fp8_backend" in option:
        option = "--fp8_backend"
    return option[2:].replace("-", "_") if option.startswith("--") else None


def _parser(
    name: str,
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser] | None,
    run: Callable[[argparse.Namespace], object],
) -> argparse.ArgumentParser:
    # ``tpu-config`` and the like are no part of this: each parser is for one command.
    options: OptionSettings = (
        {"formatter_class": SubcommandHelpFormatter} if name in ("default", "update") else {}
    )
    parser: argparse.ArgumentParser = (
        subparsers.add_parser(name, **options)
        if subparsers is not None
        else CustomArgumentParser(f"lockstep accelerate {name}", **options)
    )
    for flag, kwargs in COMMANDS[name][1]:
        parser.add_argument(flag, **kwargs)
    if subparsers is not None:
        parser.set_defaults(func=run)
    return parser


def _run(name: str, args: argparse.Namespace) -> None:
    """Run a command with the values of a namespace. Raises as the command does, or CalledProcessError for a launch."""
    where, options = COMMANDS[name]
    words: list[str] = []
    positional: list[str] = []
    for flag, _ in options:
        value = getattr(args, flag.removeprefix("--"), None)
        if not flag.startswith("--"):
            positional.append(str(value))
        elif value is True:
            words.append(flag.replace("_", "-"))
        elif value not in (None, False):
            words.append(flag.replace("_", "-"))
            words += [str(one) for one in value] if isinstance(value, list) else [str(value)]
    if name == "test":
        run_command(["test", *positional, *words])
        return
    module, _, attribute = where.partition(":")
    getattr(importlib.import_module(module), attribute).main([*positional, *words], standalone_mode=False)


def env_command_parser(subparsers: SubParsers | None = None) -> argparse.ArgumentParser:
    return _parser("env", subparsers, env_command)


def env_command(args: argparse.Namespace) -> None:
    """Print what this machine and installation have."""
    _run("env", args)


def env_main() -> int:
    env_command(env_command_parser().parse_args())
    return 0


def self_test_parser(subparsers: SubParsers | None = None) -> argparse.ArgumentParser:
    return _parser("test", subparsers, self_test)


def self_test(args: argparse.Namespace) -> None:
    """Check on this machine that distributed training is right."""
    _run("test", args)


def self_test_main() -> None:
    self_test(self_test_parser().parse_args())


def merge_command_parser(subparsers: SubParsers | None = None) -> argparse.ArgumentParser:
    return _parser("merge-weights", subparsers, merge_command)


def merge_command(args: argparse.Namespace) -> None:
    """Join sharded weights into one file."""
    _run("merge-weights", args)


def merge_main() -> None:
    merge_command(merge_command_parser().parse_args())


def estimate_command_parser(subparsers: SubParsers | None = None) -> argparse.ArgumentParser:
    return _parser("estimate-memory", subparsers, estimate_command)


def estimate_command(args: argparse.Namespace) -> None:
    """Count a model's memory by dtype."""
    _run("estimate-memory", args)


def estimate_main() -> None:
    estimate_command(estimate_command_parser().parse_args())


def to_fsdp2_command_parser(subparsers: SubParsers | None = None) -> argparse.ArgumentParser:
    return _parser("to-fsdp2", subparsers, to_fsdp2_command)


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Turn a file for FSDP 1 into one for FSDP 2.

    Raises:
        FileNotFoundError: there is no such ``config_file``.
        FileExistsError: ``output_file`` is there, and ``overwrite`` was not asked for.
        ValueError: neither ``output_file`` nor ``overwrite``, or a file that cannot be converted.
    """
    if not Path(args.config_file).exists():
        raise FileNotFoundError(f"{args.config_file} does not exist. Name a configuration file.")
    if not (args.output_file or args.overwrite):
        raise ConfigError("There is no output_file. Name one, or replace the file itself by overwrite.")
    if args.output_file and not args.overwrite and Path(args.output_file).exists():
        raise FileExistsError(f"{args.output_file} exists. Name another output_file, or pass overwrite.")
    _run("to-fsdp2", args)


def convert_config_to_fsdp2(config: dict[str, object]) -> JsonObject:
    """A configuration, as it is in a file, with ``fsdp_config`` in the words of FSDP 2. One without that is returned.

    Raises:
        ValueError: FSDP 2 does not do what it asks for.
    """
    if not config.get("fsdp_config"):
        return config
    converted, notes = in_words_of_fsdp2(YamlFile("the configuration", dict(config)))
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return converted


def load_config(config_file: str) -> JsonObject:
    """What a file says, unchecked. Raises ValueError for what is no YAML."""
    return dict(read_yaml(config_file).data)


def config_command_parser(subparsers: SubParsers | None = None) -> argparse.ArgumentParser:
    return _parser("config", subparsers, config_command)


def config_command(args: argparse.Namespace) -> None:
    """Ask what a launch needs, and write it to ``config_file``, or to the file that launch reads by itself."""
    _run("config", args)


def config_main() -> None:
    config_command(config_command_parser().parse_args())


def default_command_parser(parser: SubParsers | None, parents: object = ()) -> argparse.ArgumentParser:
    return _parser("default", parser, default_config_command)


def default_config_command(args: argparse.Namespace) -> None:
    """Write a file for all accelerators of this machine, or its CPU, without a question."""
    _run("default", args)


def update_command_parser(parser: SubParsers | None, parents: object = ()) -> argparse.ArgumentParser:
    return _parser("update", parser, update_config_command)


def update_config_command(args: argparse.Namespace) -> None:
    """Bring a file into today's form."""
    _run("update", args)


def update_config(args: argparse.Namespace) -> str:
    """``update_config_command``; returns the file."""
    from lockstep.cli.accelerate_commands import default_config_file

    update_config_command(args)
    return args.config_file or default_config_file


def get_config_parser(subparsers: SubParsers | None = None) -> argparse.ArgumentParser:
    """The parser of ``config`` with ``default`` and ``update`` below it. Run what it finds in ``func``."""
    parser = config_command_parser(subparsers)
    parser.set_defaults(func=config_command)
    below = parser.add_subparsers(title="subcommands", dest="subcommand")
    default_command_parser(below)
    update_command_parser(below)
    return parser


def config_group_main() -> None:
    args = get_config_parser().parse_args()
    args.func(args)


def launch_main() -> None:
    from lockstep.cli.accelerate_commands import launch_command, launch_command_parser

    launch_command(launch_command_parser().parse_args())


def estimate_training_usage(
    bytes: int, mixed_precision: str, msamp_config: str | None = None
) -> dict[str, int]:
    """Bytes of training with Adam, of a model that has ``bytes`` in float32; -1: it does not train in that type."""
    if mixed_precision == "float32":
        return {"model": bytes, "optimizer": 2 * bytes, "gradients": bytes, "step": 4 * bytes}
    if mixed_precision in ("float16", "bfloat16") or (mixed_precision == "fp8" and msamp_config is None):
        return {"model": bytes, "optimizer": 2 * bytes, "gradients": bytes + bytes // 2, "step": 2 * bytes}
    return dict.fromkeys(("model", "optimizer", "gradients", "step"), -1)
