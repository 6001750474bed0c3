"""``lockstep config``: questions, or flags, to a configuration file.

The questions are few, in order, with defaults of this machine; Enter takes a default.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click

from lockstep.cli.values import IntegerRange, options_of, value_type
from lockstep.config.checks import MAX_PROCESSES
from lockstep.config.settings import SETTINGS
from lockstep.config.sources import user_config_file
from lockstep.config.values import MAX_PORT, USUAL_PORT
from lockstep.words import escape

PRECISION = SETTINGS["mixed_precision"]

EPILOG = """\b
Examples:
  lockstep config
  lockstep config --num-processes 2 --cpu --mixed-precision bf16
  lockstep config --config-file two_machines.yaml --num-processes 16 --num-machines 2 \\
      --main-process-ip 10.0.0.1 --main-process-port 29500
  lockstep config default --mixed-precision bf16
  lockstep config convert ds_config.json --ranks 4 -o run.yaml
"""

DEFAULT_EPILOG = """\b
Examples:
  lockstep config default --mixed-precision bf16
"""

WHERE = "Where to write (default: the file that launch reads by default)."

CONVERT_EPILOG = """\b
Examples:
  lockstep config convert accelerate.yaml
  lockstep config convert ds_config.json --ranks 8 -o run.yaml
"""


@click.group("config", epilog=EPILOG, invoke_without_command=True)
@options_of(
    "config_file",
    "num_processes",
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "mixed_precision",
    "use_cpu",
    "num_cpu_threads_per_process",
    "gradient_accumulation_steps",
    "parallel",
    help={"config_file": WHERE},
    default={"use_cpu": None},
)
@click.option(
    "--yes", "-y", is_flag=True, help="Ask nothing. Use the defaults for all settings without an option."
)
@click.option("--force", is_flag=True, help="Overwrite an existing file without asking.")
@click.pass_context
def command(
    ctx: click.Context,
    config_file: str | None,
    yes: bool,
    force: bool,
    num_machines: tuple[int, int] | None,
    **flags: object,
) -> None:
    """Write a configuration file. Without options, it asks for the settings."""
    given = {name: value for name, value in flags.items() if value is not None}
    if ctx.invoked_subcommand is not None:
        if given or config_file or yes or force:
            raise click.UsageError(
                f"options of `lockstep config` do not go before {ctx.invoked_subcommand}. Write them after it."
            )
        return
    if num_machines is not None:
        least, most = num_machines
        given["num_machines"] = most if least == most else f"{least}:{most}"
    answers = given if given or yes else ask()
    from lockstep.compat.accelerate.write import write_config

    path = Path(config_file) if config_file else user_config_file()
    if (
        os.path.exists(path)
        and not force
        and not click.confirm(f"{path} exists. Overwrite it?", default=False)
    ):
        raise click.ClickException(
            f"{path} exists and was left as it is. Use --force, or another --config-file."
        )
    write_config(path, answers)
    click.echo(
        f"Wrote {path}. Use it with: lockstep launch" + (f" --config-file {path}" if config_file else "")
    )


@command.command("default", epilog=DEFAULT_EPILOG)
@options_of("config_file", help={"config_file": WHERE})
@click.option(
    PRECISION.flag, type=value_type(PRECISION), default=str(PRECISION.default), help=PRECISION.meaning
)
def default_command(config_file: str | None, mixed_precision: str) -> None:
    """Write a file for all GPUs of this machine, or for its CPU. Asks nothing, and replaces no file."""
    from lockstep.cli.accelerate_commands import write_basic_config

    path = Path(config_file) if config_file else user_config_file()
    if write_basic_config(mixed_precision, str(path)):
        click.echo(f"Wrote {path}.")
    else:
        click.echo(
            f"{path} exists and was left as it is. Remove it, or name another by --config-file.", err=True
        )


@command.command("convert", epilog=CONVERT_EPILOG)
@click.argument("source", metavar="FILE")
@click.option("--output", "-o", type=str, help="Where to write (default: the standard output).")
@click.option("--ranks", type=IntegerRange(1, MAX_PROCESSES), help="Processes over all machines.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def convert_command(source: str, output: str | None, ranks: int | None, force: bool) -> None:
    """Turn FILE, an Accelerate YAML or a DeepSpeed JSON, into a configuration file of Lockstep.

    A line on the standard error names each key that asks for something and has no effect.
    """
    from lockstep.compat.accelerate.write import as_yaml, write_text
    from lockstep.compat.convert import convert
    from lockstep.errors import ConfigError

    settings, warnings = convert(source, ranks)
    described = {name: settings[name] for name in ("optimizer", "scheduler") if name in settings}
    if described:
        from lockstep.compat.deepspeed.described import check_described  # with torch

        check_described(**{name: SETTINGS[name].kind.read(value, name) for name, value in described.items()})
    for warning in warnings:
        click.echo(escape(warning), err=True)
    text = f"# Converted from {Path(source).name!r}, for `lockstep launch`.\n" + as_yaml(settings)
    if output is None:
        click.echo(text, nl=False)
        return
    if os.path.exists(output) and not force:
        raise ConfigError(f"{output} exists and was left as it is. Use --force, or another --output.")
    write_text(Path(output), text)
    click.echo(f"Wrote {output}. Use it with: lockstep launch --config-file {output}")


SHARDING = "Shard the model? 0 = no, 1 = optimizer state, 2 = also gradients, 3 = also weights"


def ask() -> dict[str, object]:
    """Return the answers, by the names of settings."""
    gpus = count_gpus()
    click.echo(f"This machine has {gpus} GPUs. Enter takes the answer in brackets.", err=True)
    answers: dict[str, Any] = _machines()
    machines = answers["num_machines"]
    answers["use_cpu"] = click.confirm("Train on CPUs only", default=gpus == 0)
    usual = machines if answers["use_cpu"] or not gpus else machines * gpus
    answers["num_processes"] = click.prompt(
        "How many processes over all machines", default=usual, type=value_type(SETTINGS["num_processes"])
    )
    answers["mixed_precision"] = click.prompt(
        "Mixed precision",
        default="no" if answers["use_cpu"] else "bf16",
        type=value_type(SETTINGS["mixed_precision"]),
    )
    if answers["num_processes"] > 1:
        answers |= _sharding()
    steps = SETTINGS["gradient_accumulation_steps"]
    answers[steps.name] = click.prompt(
        "Micro-batches in a step", default=steps.default, type=value_type(steps)
    )
    return answers


def _machines() -> dict[str, object]:
    machines = click.prompt("How many machines", default=1, type=value_type(SETTINGS["min_machines"]))
    answers: dict[str, object] = {"num_machines": machines}
    if machines > 1:
        answers["machine_rank"] = click.prompt(
            "Number of this machine, from 0", default=0, type=IntegerRange(0, machines - 1)
        )
        answers["main_process_ip"] = click.prompt("Address of machine 0")
        answers["main_process_port"] = click.prompt(
            "Port there", type=IntegerRange(1, MAX_PORT), default=USUAL_PORT
        )
    return answers


def _sharding() -> dict[str, object]:
    stage = click.prompt(SHARDING, default=0, type=IntegerRange(0, 3))
    if not stage:
        return {}
    words = [f"zero={stage}"]
    if click.confirm("Keep weights and the optimizer's state in host memory", default=False):
        words.append("offload")
    if click.confirm("Compute activations again in backward, to save memory", default=False):
        words.append("activation=full")
    return {"parallel": " ".join(words)}


def count_gpus() -> int:
    """GPUs of NVIDIA that their driver lists, without importing torch; 0 where it is not there."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
