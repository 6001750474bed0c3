"""``lockstep launch``: flags, file and environment to a plan, then run or print it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from lockstep.cli.foreign_flags import FOREIGN_FLAGS, FOREIGN_SWITCHES, spread_settings
from lockstep.config.checks import (
    MAX_ACCUMULATION_STEPS,
    MAX_MACHINES,
    MAX_PORT,
    MAX_PROCESSES,
    MAX_THREADS,
)
from lockstep.config.deepspeed import from_deepspeed
from lockstep.config.parallel import Parallel
from lockstep.config.rules import Translation
from lockstep.config.sources import inherited_environment, user_config_file
from lockstep.config.values import parse_gpus, parse_host
from lockstep.errors import ConfigError
from lockstep.launch.plan import LaunchPlan, Program, Setting, available_cores, make_plan, merge

F = TypeVar("F", bound=Callable[..., Any])

EPILOG = """\b
Examples:
  lockstep launch --nproc 2 train.py --epochs 3
  lockstep launch --config-file two_machines.yaml --node-rank 1 train.py
  lockstep launch --nproc 4 --mixed-precision bf16 -m package.train
  lockstep launch --nproc 4 --parallel "zero=3 activation=full" train.py
  lockstep launch --nproc 2 --log-dir logs --dry-run train.py
"""


def _dashes(token: str) -> str:
    """Accelerate spells options with underscores: both forms are one."""
    return token.replace("_", "-")


# Accelerate's switches for what does not exist here yet: refused by name, not as unknown
LATER_SWITCHES = {"use_megatron_lm": "Megatron-LM settings", "tpu": "training on TPUs"}


def _compatibility(function: F) -> F:
    """Hidden options that Accelerate's command lines carry."""
    for name in FOREIGN_FLAGS:
        function = click.option("--" + _dashes(name), name, type=str, hidden=True)(function)
    for name in (*LATER_SWITCHES, *FOREIGN_SWITCHES):
        function = click.option("--" + _dashes(name), name, is_flag=True, hidden=True)(function)
    for name in ("same_network", "quiet"):  # without effect here
        function = click.option("--" + _dashes(name), name, is_flag=True, hidden=True, expose_value=False)(
            function
        )
    return function


class Checked(click.ParamType):
    """A value read by one of the functions of ``config.values``."""

    def __init__(self, name: str, parse: Callable[[Any], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value)
        except ConfigError as error:
            self.fail(f"{error}.", param, ctx)


PRECISION = click.Choice(["no", "fp16", "bf16"], case_sensitive=False)


@click.command(
    "launch",
    epilog=EPILOG,
    context_settings={
        "allow_interspersed_args": False,
        "max_content_width": 110,
        "token_normalize_func": _dashes,
    },
)
@click.option(
    "--nproc",
    "--nproc-per-node",
    "nproc",
    type=click.IntRange(1, MAX_PROCESSES),
    help="Processes on this machine.",
)
@click.option(
    "--num-processes",
    "num_processes",
    type=click.IntRange(1, MAX_PROCESSES),
    help="Processes over all machines.",
)
@click.option(
    "--num-cpu-threads",
    "--num-cpu-threads-per-process",
    "num_cpu_threads_per_process",
    type=click.IntRange(1, MAX_THREADS),
    help="Threads of each process (default: cores / processes).",
)
@click.option(
    "--config-file",
    "config_file",
    type=str,
    help="YAML, in Lockstep's or Accelerate's form (default: the one that `lockstep config` wrote).",
)
@click.option("--mixed-precision", "mixed_precision", type=PRECISION, help="Precision of autocast.")
@click.option(
    "--gradient-accumulation-steps",
    "gradient_accumulation_steps",
    type=click.IntRange(1, MAX_ACCUMULATION_STEPS),
    help="Micro-batches in a step.",
)
@click.option(
    "--parallel",
    "parallel",
    type=Checked("WORDS", lambda value: str(Parallel.parse(value))),
    help="How models are spread, such as 'zero=3 activation=full'.",
)
@click.option(
    "--gradient-clipping",
    "gradient_clipping",
    type=click.FloatRange(0),
    help="Clip gradients to this norm at each step.",
)
@click.option(
    "--deepspeed-config-file",
    "deepspeed_config_file",
    type=str,
    help="A DeepSpeed JSON; all other settings must agree with it.",
)
@click.option("--cpu", "--use-cpu", "use_cpu", is_flag=True, default=None, help="Train on CPUs only.")
@click.option("--multi-gpu", "multi_gpu", is_flag=True, default=None, help="Train on this machine's GPUs.")
@click.option(
    "--gpu-ids",
    "gpu_ids",
    type=Checked("GPUS", parse_gpus),
    help="GPUs to use: 'all' or numbers such as 0,1.",
)
@click.option(
    "--nnodes",
    "--num-machines",
    "num_machines",
    type=click.IntRange(1, MAX_MACHINES),
    help="Number of machines.",
)
@click.option(
    "--node-rank",
    "--machine-rank",
    "machine_rank",
    type=click.IntRange(0, MAX_MACHINES - 1),
    help="This machine's number, from 0.",
)
@click.option(
    "--main-process-ip",
    "--master-addr",
    "main_process_ip",
    type=Checked("HOST", parse_host),
    help="Address of the machine with rank 0.",
)
@click.option(
    "--main-process-port",
    "--master-port",
    "main_process_port",
    type=click.IntRange(0, MAX_PORT),
    help="Port there (one machine: a free one by default).",
)
@click.option(
    "--rdzv-backend",
    "rdzv_backend",
    type=click.Choice(["static", "c10d"]),
    help="How several machines find each other.",
)
@click.option("--debug", "debug", is_flag=True, default=None, help="Set TORCH_DISTRIBUTED_DEBUG=DETAIL.")
@click.option("--module", "-m", "module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.option("--no-python", "no_python", is_flag=True, help="SCRIPT is any program, run without python.")
@click.option(
    "--log-dir", "log_dir", type=str, help="Write each rank's output to rank-N.out and rank-N.err here."
)
@click.option("--tee", "tee", is_flag=True, help="With --log-dir: show the output as well.")
@click.option("--dry-run", "dry_run", is_flag=True, help="Print what would run, and run nothing.")
@_compatibility
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, script: str, arguments: tuple[str, ...], **options: Any) -> None:
    """Run SCRIPT with ARGUMENTS on one or more processes.

    What is said by flags wins over the environment, and that over the configuration file.
    """
    program = Program(script, arguments, options["module"], options["no_python"])
    program.command()  # a missing script is refused before anything is read or imported
    settings = merge(_flags(ctx, options), _file(options["config_file"]), inherited_environment())
    described = _described(settings["deepspeed_config_file"].value)
    plan = make_plan(
        program,
        settings,
        device_count=_device_count(settings),
        cores=available_cores(),
        log_dir=options["log_dir"],
        tee=options["tee"],
        described=described.says,
    )
    if options["dry_run"]:
        for warning in described.warnings:  # in a run, the main process says them
            click.echo(f"lockstep launch: {warning}", err=True)
        _print(plan)
        return
    from lockstep.launch.local import end_process, launch

    end_process(launch(plan))


def _flags(ctx: click.Context, options: dict[str, Any]) -> dict[str, Setting]:
    """The settings that were given as flags."""
    given = {
        name: Setting(value, f"flag --{name.replace('_', '-')}")
        for name, value in options.items()
        if value is not None and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    for name, what in LATER_SWITCHES.items():
        if options[name]:
            raise ConfigError(f"--{_dashes(name)} asks for {what}, which is not available yet. Drop it.")
    if "nproc" in given and "num_processes" in given:
        raise ConfigError("--nproc and --num-processes both say how many processes to run. Give one of them.")
    if "multi_gpu" in given and "use_cpu" in given:
        raise ConfigError("--multi-gpu and --cpu contradict each other. Give one of them.")
    if "multi_gpu" in given:
        given["use_cpu"] = Setting(False, "flag --multi-gpu")
    spread, warnings = spread_settings(given, options)
    for warning in warnings:
        click.echo(f"lockstep launch: {warning}", err=True)
    return given | spread


def _described(path: str | None) -> Translation:
    """The DeepSpeed configuration, if there is one, checked before anything starts."""
    return from_deepspeed(path) if path is not None else Translation({})


def _file(path: str | None) -> dict[str, Setting]:
    """The settings of the configuration file, if one is given or the user has a default one."""
    default = user_config_file()
    if path is None and not default.is_file():
        return {}
    from lockstep.config.accelerate import load

    loaded = load(path if path is not None else default)
    if path is None:
        click.echo(f"lockstep launch: settings from {default}", err=True)
    for warning in loaded.warnings:
        click.echo(f"lockstep launch: {warning}", err=True)
    return {
        name: Setting(value, loaded.origins.get(name, str(path)))
        for name, value in loaded.config.given().items()
    }


def _device_count(settings: dict[str, Setting]) -> int:
    """GPUs of this machine; asked only when the number of processes depends on it."""
    if settings["num_processes"].value is not None or settings["use_cpu"].value:
        return 0
    import torch

    return torch.cuda.device_count()


def _print(plan: LaunchPlan) -> None:
    """What ``--dry-run`` shows."""
    import shlex

    from rich.console import Console

    from lockstep.launch.plan import describe

    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{plan.nproc} processes on this machine, each:", style="bold")
    console.print("  " + shlex.join(plan.command), markup=False)
    console.print("with the environment:", style="bold")
    for name, value in sorted(plan.environment.items()):
        console.print(f"  {name}={value}", markup=False)
    console.print("from the configuration:", style="bold")
    for name, value, origin in describe(plan):
        console.print(f"  {name:<28} {value:<12} {origin}", markup=False)
