"""``lockstep launch``: flags, file and environment to a plan, then run or print it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from lockstep.cli.launch_options import (
    LaunchCommand,
    dashes,
    misplaced,
    options,
    reads_local_rank,
    trains_alone,
)
from lockstep.compat.accelerate.flags import FP8_FLAGS, check_refused, spread_settings
from lockstep.compat.deepspeed.config import from_deepspeed
from lockstep.compat.rules import Translation
from lockstep.compat.settings import environment_settings
from lockstep.config.checks import LOCAL
from lockstep.config.merge import (
    joined_sources,
    merge_settings,
    parallel_of,
    parallel_sources,
    values_of_settings,
)
from lockstep.config.settings import DECLARED
from lockstep.config.sources import (
    CONFIG_VARIABLE,
    accelerate_config_file,
    inherited_environment,
    named_config_file,
    unknown_variables,
    user_config_file,
)
from lockstep.config.values import SettingValue
from lockstep.errors import ConfigError
from lockstep.launch.plan import LaunchPlan, Program, available_cores, make_plan, merge

if TYPE_CHECKING:
    from lockstep.compat.accelerate.config_file import LoadedConfig

EPILOG = """\b
Examples:
  lockstep launch --nproc 2 train.py --epochs 3
  lockstep launch --nproc 4 --mixed-precision bf16 -m package.train
  lockstep launch --nproc 4 --parallel "zero=3 activation=full" train.py
  lockstep launch --nproc 2 --as-accelerate train.py
  lockstep launch --nproc 2 --log-dir logs --dry-run train.py
  lockstep launch --config-file two_machines.yaml --node-rank 1 train.py
  lockstep launch --nnodes 1:4 --nproc 8 --rdzv 10.0.0.1:29500 train.py
  lockstep launch --hosts host1:8,host2:8 train.py
  lockstep launch --slurm --nnodes 2 --nproc 8 --slurm-option partition=gpu train.py
  lockstep launch --mpi --hosts host1,host2 --nproc 8 train.py
  lockstep launch --ray --nnodes 2 --nproc 8 train.py
  lockstep launch --k8s jobset --k8s-option image=registry/train:1 --nnodes 2 --nproc 8 --dry-run train.py
"""


class PlannedLaunch(NamedTuple):
    """What a command line asks for: the plan, sentences for people, and what only the processes of a run say."""

    plan: LaunchPlan
    sentences: list[str]
    of_processes: tuple[str, ...]


def command_function(ctx: click.Context, script: str, arguments: tuple[str, ...], **options: Any) -> None:
    """Run SCRIPT with ARGUMENTS on one or more processes, of one or more machines.

    Flags win over environment variables, and these win over the configuration file.
    """
    plan, sentences, of_processes = _planned(ctx, script, arguments, options)
    for sentence in (*sentences, *(of_processes if options["dry_run"] else ())):
        click.echo(f"lockstep: {sentence}", err=True)
    if options["dry_run"]:
        _print(plan)
        return
    from lockstep.launch.backend import get_backend
    from lockstep.launch.local import end_process

    end_process(get_backend(plan.transport.backend).launch(plan))


def check_launch(flags: Sequence[str], words: Sequence[str]) -> None:
    """Refuse now what a launch of ``words`` with these flags would refuse. Nothing is started or printed.

    Raises:
        ConfigError: a setting is wrong, or contradicts another one.
    """
    with command.make_context("lockstep launch", [*flags, *words]) as ctx:
        options = dict(ctx.params)
        _planned(ctx, options.pop("script"), options.pop("arguments"), options)


def _planned(
    ctx: click.Context, script: str, arguments: tuple[str, ...], options: dict[str, Any]
) -> PlannedLaunch:
    in_pods = options["k8s"] is not None
    is_accelerates = ctx.parent is not None and ctx.parent.info_name == "accelerate"
    program = Program(
        script,
        arguments,
        bool(options["module"]),
        bool(options["no_python"]),
        in_pods,
        bool(options["as_accelerate"] or (is_accelerates and not options["no_python"])),
    )
    # A missing script is refused before anything is read or imported.
    program.command()
    environ = inherited_environment()
    also = accelerate_config_file(environ) if is_accelerates and not options["use_cpu"] else None
    sentences: list[str] = []
    given_by_file, loaded = _file(options["config_file"], sentences, also)
    settings = merge(_flags(ctx, options, sentences), given_by_file, environ)
    sentences += unknown_variables(environ)
    asked = environment_settings(environ, settings["num_machines"].value)
    if asked.settings:
        settings["parallel"] = _with_words(settings["parallel"], asked.settings)
    # Checked before anything starts.
    json_file = settings["deepspeed_config_file"].value
    described = Translation({}) if json_file is None else from_deepspeed(json_file)
    plan = make_plan(
        program,
        settings,
        device_count=_device_count(settings),
        cores=available_cores(),
        log_dir=options["log_dir"],
        # Where no files are written, everything is on the console, which is all that a value of --tee asks for.
        tee=bool(options["tee"] or (options["tee_all"] and options["log_dir"] is not None)),
        described=described.settings,
        output=options["output"],
        quiet=bool(options["quiet"]),
    )
    if plan.secret_file is not None:
        from lockstep.launch.backend import check_secret_file

        check_secret_file(plan)
    sentences += _without_effect(ctx, options, program, plan, loaded)
    return PlannedLaunch(plan, sentences, (*asked.warnings, *described.warnings))


command = LaunchCommand(
    "launch",
    callback=click.pass_context(command_function),
    help=command_function.__doc__,
    epilog=EPILOG,
    context_settings={
        "allow_interspersed_args": False,
        "max_content_width": 110,
        "token_normalize_func": dashes,
    },
    params=[
        *options(),
        click.Argument(["script"]),
        click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED),
    ],
)


def _flags(ctx: click.Context, options: dict[str, object], sentences: list[str]) -> dict[str, SettingValue]:
    """Return the settings that were given as flags. Warnings are added to ``sentences``."""
    given = {
        name: SettingValue(value, f"flag --{dashes(name)}")
        for name, value in options.items()
        if value is not None
        and name not in FP8_FLAGS
        and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    check_refused(options)
    if "nproc" in given and "num_processes" in given:
        raise ConfigError("--nproc and --num-processes both say how many processes to run. Give one of them.")
    if "multi_gpu" in given and "use_cpu" in given:
        raise ConfigError("--multi-gpu and --cpu contradict each other. Give one of them.")
    if "multi_gpu" in given:
        given["use_cpu"] = SettingValue(False, "flag --multi-gpu")
    given |= _of_several_machines(given)
    spread, warnings = spread_settings(given, options)
    sentences += warnings
    return given | spread


def _of_several_machines(given: dict[str, SettingValue]) -> dict[str, SettingValue]:
    """Return the settings of flags that say two at once, or may be repeated."""
    found: dict[str, SettingValue] = {}
    if "num_machines" in given:
        least, most = given["num_machines"].value
        source = f"flag {DECLARED['num_machines'].flag}"
        found["num_machines"] = SettingValue(most, source)
        found["min_machines"] = SettingValue(least, source)
    if "rdzv" in given:
        flag = DECLARED["rdzv"].flag
        for name, value in zip(("main_process_ip", "main_process_port"), given["rdzv"].value, strict=True):
            if name in given:
                raise ConfigError(f"{flag} and --{dashes(name)} both set the same address. Give one of them.")
            found[name] = SettingValue(value, f"flag {flag}")
    for name in ("slurm_options", "k8s_options"):
        if name in given:
            flag = DECLARED[name].flag
            pairs = given[name].value
            if len(dict(pairs)) != len(pairs):
                raise ConfigError(f"{flag} gives an option twice. Give it once.")
            found[name] = SettingValue(dict(pairs), f"flag {flag}")
    if "forward_env" in given:
        names = [name for group in given["forward_env"].value for name in group]
        found["forward_env"] = SettingValue(tuple(dict.fromkeys(names)), given["forward_env"].source)
    return found


def _with_words(setting: SettingValue, asked: Mapping[str, SettingValue]) -> SettingValue:
    """Return the setting ``parallel`` with what else says words of it."""
    own = values_of_settings({"parallel": (setting.value, setting.source)})
    own = {
        name: SettingValue(given.value, setting.words.get(name, given.source)) for name, given in own.items()
    }
    together = merge_settings(asked, own)
    words = parallel_sources(together)
    return SettingValue(str(parallel_of(together)), joined_sources(words), words)


def _without_effect(
    ctx: click.Context,
    options: dict[str, object],
    program: Program,
    plan: LaunchPlan,
    loaded: LoadedConfig | None,
) -> Iterator[str]:
    """Yield a sentence on each flag that the script gets, and on GPUs that are asked for and not there."""
    target = program.target
    for flag in misplaced(ctx, program.arguments, target):
        yield (
            f"{flag} comes after {target}, so it is passed to the script. If it is meant for the launch, write "
            f"it before {target}."
        )
    if plan.nproc * plan.num_machines > 1 and trains_alone(target):
        yield (
            f"{target} uses neither Lockstep nor torch.distributed, so each of the {plan.nproc * plan.num_machines} "
            "processes trains the whole script by itself. Add the five lines of `from lockstep import Accelerator` "
            '(the page "Your first run"), or launch one process.'
        )
    if reads_local_rank(program.target):
        yield (
            f"{program.target} has an option --local_rank, which is not passed. Read os.environ['LOCAL_RANK'] in its "
            "place, as with torchrun."
        )
    asked = "--multi-gpu" if options["multi_gpu"] else loaded.gpus if loaded is not None else ""
    asked = asked or ("--gpu-ids" if options["gpu_ids"] is not None else "")
    if asked and plan.transport.backend == LOCAL and not plan.settings["use_cpu"].value:
        import torch

        if not torch.accelerator.is_available():
            yield (
                f"{asked} asks for GPUs, but torch {torch.__version__} finds none on this machine: the script trains "
                "on the CPU."
            )


def _file(
    path: str | None, sentences: list[str], also: Path | None
) -> tuple[dict[str, SettingValue], LoadedConfig | None]:
    """Return the settings of the configuration file that is given, or of the user's default one, and what else it says.

    Warnings are added to ``sentences``. ``also`` is a default file where the user has none of ours.
    """
    named = None if path is not None else named_config_file()
    default = user_config_file()
    if also is not None and named is None and not os.path.lexists(default):
        default = also
    if path is None and named is None and not os.path.lexists(default):
        return {}, None
    from lockstep.compat.accelerate.config_file import load

    if path is not None:
        loaded = load(path)
    else:
        try:
            loaded = load(named or default)
        except ConfigError as error:
            raise ConfigError(f"{CONFIG_VARIABLE}: {error}" if named else str(error)) from None
        sentences.append(f"settings from {default}")
    sentences += loaded.warnings
    given = {
        name: SettingValue(
            value, loaded.origins.get(name, str(path)), loaded.words if name == "parallel" else {}
        )
        for name, value in loaded.config.given().items()
    }
    return given, loaded


def _device_count(settings: dict[str, SettingValue]) -> int:
    """GPUs of this machine; asked only when the number of processes depends on it."""
    if settings["num_processes"].value is not None or settings["use_cpu"].value:
        return 0
    import torch

    return torch.cuda.device_count()


def _print(plan: LaunchPlan) -> None:
    """Print what ``--dry-run`` shows: of manifests their text alone, for ``kubectl`` to read."""
    from rich.console import Console

    from lockstep.launch.backend import get_backend
    from lockstep.launch.plan import describe_plan

    if plan.transport.backend == "k8s":
        from lockstep.launch.kubernetes import manifests

        click.echo(manifests(plan), nl=False)
        return
    console = Console(soft_wrap=True, highlight=False)
    for command in get_backend(plan.transport.backend).commands(plan):
        for line in command.lines():
            console.print(line, markup=False, style=None if line.startswith(" ") else "bold")
    console.print("from the configuration:", style="bold")
    for name, value, origin in describe_plan(plan):
        console.print(f"  {name:<28} {value:<12} {origin}", markup=False)
