"""``lockstep check``: two runs of a script, compared tensor by tensor."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.cli.output import kept_folder, print_table, write_json
from lockstep.cli.values import IntegerRange, options_of
from lockstep.words import escape, escaped_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lockstep.config.parallel import Parallel
    from lockstep.verify.judge.verdict import ParityVerdict

DIFFERS, COULD_NOT_RUN = 1, 2
MAX_STEPS = 1000
LARGEST_SEED = 2**32 - 1

EPILOG = """\b
Examples:
  lockstep check train.py
  lockstep check --nproc 4 --parallel "zero=3 tp=2" train.py --epochs 1
  lockstep check --mixed-precision bf16 --steps 5 --html report.html train.py
  lockstep check --reference zero=1 --parallel zero=3 train.py
  lockstep check --nproc 1 --record before.trace train.py
  lockstep check --nproc 1 --against before.trace train.py
\b
Exit codes: 0: the numbers agree. 1: they differ. 2: there is no answer, and a sentence says why.
"""


@click.command("check", epilog=EPILOG, context_settings={"allow_interspersed_args": False})
@options_of(
    "nproc",
    "parallel",
    "mixed_precision",
    help={
        "nproc": "Ranks of the candidate.",
        "parallel": "How the candidate divides models (default: as in the script).",
        "mixed_precision": "Precision of the candidate (default: as in the script). The reference computes in fp32.",
    },
    default={"nproc": 2},
)
@click.option(
    "--steps",
    type=IntegerRange(1, MAX_STEPS),
    default=3,
    show_default=True,
    help="Optimizer steps to compare.",
)
@click.option(
    "--seed", type=IntegerRange(0, LARGEST_SEED), default=0, show_default=True, help="Seed of all runs."
)
@click.option(
    "--reference", help="Compare with this strategy on the same number of ranks, not with one process."
)
@click.option(
    "--record", type=click.Path(path_type=Path, dir_okay=False), help="Keep the trace of the reference."
)
@click.option(
    "--against",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Compare with a trace kept by --record, for example after an update of torch.",
)
@options_of("as_accelerate")
@click.option(
    "--wrapped",
    is_flag=True,
    help="SCRIPT divides its models itself: by torch's DDP or fully_shard, or by Accelerate.",
)
@options_of(
    "module",
    "config_file",
    "use_cpu",
    help={
        "config_file": "Launch the candidate with the settings of this file.",
        "use_cpu": "Compute on CPUs only.",
    },
)
@click.option(
    "--timeout", type=IntegerRange(1, 10**6), default=3600, show_default=True, help="Seconds for each run."
)
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the report as JSON; '-': print it."
)
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write the report as a page.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep traces and output in this new folder.",
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    nproc: int,
    parallel: str | None,
    mixed_precision: str | None,
    steps: int,
    seed: int,
    reference: str | None,
    record: Path | None,
    against: Path | None,
    as_accelerate: bool,
    wrapped: bool,
    module: bool,
    config_file: str | None,
    use_cpu: bool,
    timeout: int,
    json_path: Path | None,
    html: Path | None,
    keep: Path | None,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Prove that SCRIPT computes the same on many ranks as on one, or name the first tensor that differs.

    The script runs unchanged for a few steps: once on one process (the reference), twice more to measure rounding, and
    once on many ranks (the candidate).
    """
    from lockstep.cli.launch import check_launch
    from lockstep.config.world import axes_of
    from lockstep.verify.check import ParityCheck, Request
    from lockstep.verify.runs import CheckedProgram, CouldNotRun

    if reference is not None and against is not None:
        raise click.UsageError("--reference and --against both say what to compare with. Give one of them.")
    if wrapped and (reference, parallel, mixed_precision, as_accelerate) != (None, None, None, False):
        raise click.UsageError(
            "--wrapped is for scripts that spread their models themselves, so --parallel, --reference, "
            "--mixed-precision and --as-accelerate have no effect. Drop these options."
        )
    axes_of(_parallel(parallel), nproc)
    if reference is not None:
        axes_of(_parallel(reference), nproc)
    flags = [
        *(["--config-file", config_file] if config_file is not None else []),
        *(["--cpu"] if use_cpu else []),
    ]
    check_launch(["--nproc", str(nproc), *flags, *(["-m"] if module else [])], [script, *arguments])
    with kept_folder("check", keep) as folder, _progress() as tell:
        request = Request(
            program=CheckedProgram((script, *arguments), module, as_accelerate, wrapped),
            folder=folder,
            nproc=nproc,
            parallel=parallel,
            mixed_precision=mixed_precision,
            steps=steps,
            seed=seed,
            reference=reference,
            record=record,
            against=against,
            flags=tuple(flags),
            timeout_s=timeout,
        )
        try:
            verdict = ParityCheck(request, tell).verdict()
        except CouldNotRun as error:
            verdict, reason = None, str(error)
    if verdict is None:
        write_json(json_path, {"format": "lockstep check 1", "agrees": None, "sentence": reason})
        click.echo(f"lockstep: {escaped_lines(reason)}", err=True)
        sys.exit(COULD_NOT_RUN)
    _print_verdict(verdict, json_path, html)
    sys.exit(0 if verdict.agrees else DIFFERS)


def _parallel(words: str | None) -> Parallel:
    from lockstep.config.parallel import Parallel

    return Parallel.parse(words)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show a line on a terminal that says what is being done."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: None
        return
    with console.status("") as status:
        yield lambda what: status.update(escape(what))


def _print_verdict(verdict: ParityVerdict, json_path: Path | None, html: Path | None) -> None:
    from lockstep.verify.text import RIGHT, TITLES, remarks, rows, sentence, to_json

    if html is not None:
        html.write_text(page_of_verdict(verdict), "utf-8")
    write_json(json_path, to_json(verdict))
    if json_path is not None and str(json_path) == "-":
        return
    click.echo(escaped_lines(sentence(verdict)))
    if verdict.findings:
        click.echo()
        print_table(TITLES, rows(verdict), right=RIGHT)
        click.echo()
    for remark in remarks(verdict):
        click.echo(escaped_lines(remark))


def page_of_verdict(verdict: ParityVerdict) -> str:
    """Return the page that ``--html`` writes."""
    from lockstep.report.page import MOST_ROWS, check_page
    from lockstep.verify.text import RIGHT, TITLES, distances, remarks, rows, sentence

    steps, table = distances(verdict)
    return check_page(
        sentence(verdict),
        remarks(verdict),
        verdict.agrees,
        time.time(),
        columns=TITLES,
        right=RIGHT,
        findings=rows(verdict, MOST_ROWS),
        steps=steps,
        distances=table,
    )
