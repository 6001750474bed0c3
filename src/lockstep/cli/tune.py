"""``lockstep tune``: the micro-batch that fits, and the quickest one, for the same global batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.cli.output import kept_folder, print_table, write_json
from lockstep.cli.values import IntegerRange, options_of
from lockstep.words import escape, escaped_lines

if TYPE_CHECKING:
    from lockstep.tune.tuner import Tuner, TuneRequest, TuneResult

NONE_FITS, COULD_NOT_TUNE = 1, 2
MAX_STEPS = 1000
MAX_BATCH = 10**9
LARGEST_SEED = 2**32 - 1

EPILOG = """\b
Examples:
  lockstep tune train.py
  lockstep tune --nproc 4 --parallel zero=2 train.py --epochs 1
  lockstep tune --nproc 2 --global-batch 512 --memory-limit 8GiB train.py
  lockstep tune --dry-run --global-batch 64 train.py
  lockstep tune --json - train.py
\b
Exit codes: 0: there is a size that fits. 1: no size fits. 2: there is no answer, and a sentence says why.
"""


@click.command("tune", epilog=EPILOG, context_settings={"allow_interspersed_args": False})
@options_of(
    "nproc",
    "parallel",
    help={"nproc": "Ranks.", "parallel": "How models are divided (default: as in the script)."},
    default={"nproc": 1},
)
@click.option(
    "--global-batch",
    type=IntegerRange(1, MAX_BATCH),
    help="Rows of an optimizer step over all ranks (default: as in the script).",
)
@click.option(
    "--memory-limit", metavar="SIZE", help="Memory of each rank: 8GiB, 500MB (default: the free memory)."
)
@click.option(
    "--steps",
    type=IntegerRange(1, MAX_STEPS),
    default=5,
    show_default=True,
    help="Optimizer steps of each trial; the time of the first two is left out.",
)
@click.option(
    "--seed", type=IntegerRange(0, LARGEST_SEED), default=0, show_default=True, help="Seed of each trial."
)
@options_of(
    "as_accelerate",
    "module",
    "config_file",
    "use_cpu",
    help={
        "config_file": "Launch the trials with the settings of this file.",
        "use_cpu": "Compute on CPUs only.",
    },
)
@click.option(
    "--timeout", type=IntegerRange(1, 10**6), default=600, show_default=True, help="Seconds for each trial."
)
@options_of("dry_run", help={"dry_run": "Print which trials would be made, and make none."})
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the report as JSON; '-': print it."
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the output and the results of the trials in this new folder.",
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    nproc: int,
    parallel: str | None,
    global_batch: int | None,
    memory_limit: str | None,
    steps: int,
    seed: int,
    as_accelerate: bool,
    module: bool,
    config_file: str | None,
    use_cpu: bool,
    timeout: int,
    dry_run: bool,
    json_path: Path | None,
    keep: Path | None,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Find the largest and the fastest micro-batch that fits, for the same rows in each step.

    SCRIPT runs unchanged, once for each size, for a few optimizer steps. The loader gives micro-batches of that size,
    and gradients are accumulated until the step has the same number of rows. If a trial runs out of memory or is
    killed, its size does not fit.
    """
    from lockstep.cli.launch import check_launch
    from lockstep.config.parallel import Parallel
    from lockstep.config.values import bytes_of
    from lockstep.config.world import axes_of
    from lockstep.tune.tuner import CouldNotTune, Tuner, TuneRequest

    axes = axes_of(Parallel.parse(parallel), nproc)
    limit = None if memory_limit is None else bytes_of(memory_limit, "--memory-limit", at_least=1)
    flags = [
        *("--nproc", str(nproc)),
        *(["--config-file", config_file] if config_file is not None else []),
        *(["--cpu"] if use_cpu else []),
    ]
    check_launch([*flags, *(["-m"] if module else [])], [script, *arguments])
    with kept_folder("tune", keep) as folder, _progress() as tell:
        request = TuneRequest(
            words=(script, *arguments),
            folder=folder,
            is_module=module,
            as_accelerate=as_accelerate,
            steps=steps,
            seed=seed,
            parallel=parallel,
            global_batch=global_batch,
            memory_limit=limit,
            flags=tuple(flags),
            timeout_s=timeout,
        )
        if dry_run:
            _say_plan(request, axes.data)
            return
        result: TuneResult | None
        try:
            result = _tuned(Tuner(request, tell))
        except CouldNotTune as error:
            result, reason = None, str(error)
    if result is None:
        write_json(json_path, {"format": "lockstep tune 1", "largest": None, "sentence": reason})
        click.echo(f"lockstep: {escaped_lines(reason)}", err=True)
        sys.exit(COULD_NOT_TUNE)
    _print_result(result, json_path)
    sys.exit(0 if result.largest is not None else NONE_FITS)


def _tuned(tuner: Tuner) -> TuneResult:
    from lockstep.tune.remarks import refuse_sums

    result = tuner.result()
    refuse_sums(result)
    return result


def _say_plan(request: TuneRequest, data_ranks: int) -> None:
    from lockstep.tune.search import divisors
    from lockstep.words import memory_text

    limit = (
        "what is free when it starts" if request.memory_limit is None else memory_text(request.memory_limit)
    )
    click.echo(
        f"Each trial: {escaped_lines(' '.join(['lockstep launch', *request.flags, *request.words]))}, ended after "
        f"{request.steps} optimizer steps or {request.timeout_s:g} s. Memory of each rank: {limit}."
    )
    click.echo("1. The script as it is: its micro-batch, its accumulation steps, its memory.")
    rows = None if request.global_batch is None else request.global_batch // data_ranks
    sizes = "divisors of a rank's rows of a step"
    if rows is not None:
        sizes += f" ({rows}): {', '.join(map(str, divisors(rows)))}"
    click.echo(
        f"2. Larger ones, doubled while they fit, then bisected; or smaller ones, if it does not fit. Sizes: {sizes}."
    )


@contextmanager
def _progress() -> Iterator[Callable[[int, str], None]]:
    """Show a bar on a terminal: trials that are over, and the one that runs."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        BarColumn(),
        TextColumn("{task.completed} sizes tried; now: {task.description}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)  # how many it will be shows as they are made
        yield lambda done, what: bar.update(task, completed=done, description=escape(what))


def _print_result(result: TuneResult, json_path: Path | None) -> None:
    from lockstep.tune.remarks import remarks_on
    from lockstep.tune.report import RIGHT, TITLES, how_to_use, rows, sentence, to_json

    write_json(json_path, to_json(result))
    if json_path is not None and str(json_path) == "-":
        return
    print_table(TITLES, rows(result), right=RIGHT)
    click.echo()
    click.echo(escaped_lines(sentence(result)))
    lines = how_to_use(result)
    if lines:
        click.echo("To train with the quickest:")
    for line in lines:
        click.echo(f"  {line}")
    for remark in remarks_on(result):
        click.echo(escaped_lines(remark))
