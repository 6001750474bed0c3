"""``lockstep replay``: one bad step again, in one process."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

from lockstep.cli.output import print_table, write_json
from lockstep.cli.values import IntegerRange, options_of
from lockstep.words import escaped_lines

NOTHING, COULD_NOT_RUN = 1, 2

EPILOG = """\b
Examples:
  lockstep replay run/capsules/step-000120 train.py
  lockstep replay run/capsules/step-000120 train.py --epochs 3
  lockstep replay --json - -m run/capsules/step-000120 trainer.main
\b
Exit codes: 0: the first place that went wrong is named. 1: nothing unusual was found. 2: there is no answer, and a
sentence says why.
"""


@click.command("replay", epilog=EPILOG, context_settings={"allow_interspersed_args": False})
@click.option(
    "--ordinary",
    type=IntegerRange(0, 1000),
    default=8,
    show_default=True,
    help="Number of ordinary batches to compare with, if all numbers of the step are finite.",
)
@options_of("as_accelerate", "module")
@click.option(
    "--timeout", type=IntegerRange(1, 10**6), default=3600, show_default=True, help="Seconds for the replay."
)
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the report as JSON; '-': print it."
)
@click.argument("capsule", type=click.Path(path_type=Path))
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    ordinary: int,
    as_accelerate: bool,
    module: bool,
    timeout: int,
    json_path: Path | None,
    capsule: Path,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Repeat the step of CAPSULE, and name the first module that went wrong in it.

    SCRIPT is the script of the run, with its arguments. It runs in one process up to the first step. There
    the saved weights, batches and random numbers are put in, rank by rank. The optimizer does not step.
    SpikePolicy writes capsules to the folder of a run.
    """
    from lockstep.checkpoint.format.capsule import WEIGHTS
    from lockstep.checkpoint.store.local import LocalStore
    from lockstep.checkpoint.store.verify import verify_checkpoint
    from lockstep.launch.plan import Program
    from lockstep.replay.replay import replay
    from lockstep.replay.run import ReplayedRun, ReplaySpec
    from lockstep.verify.runs import CouldNotRun

    Program(script, arguments, module).command()  # refuses what is not there
    with tempfile.TemporaryDirectory(prefix="lockstep-replay-") as folder:
        output = str(Path(folder) / "verdict.json")
        spec = ReplaySpec(str(capsule.absolute()), output, ordinary, as_accelerate, module)
        # Both refuse a capsule that is not whole.
        if ReplayedRun(spec).facts.has_weights:
            verify_checkpoint(LocalStore(), str(capsule.absolute() / WEIGHTS))
        try:
            verdict, reason = replay(spec, (script, *arguments), Path(folder), timeout), ""
        except CouldNotRun as error:
            verdict, reason = None, str(error)
    if verdict is None:
        write_json(json_path, {"format": "lockstep replay 1", "finding": None, "sentence": reason})
        click.echo(f"lockstep: {escaped_lines(reason)}", err=True)
        sys.exit(COULD_NOT_RUN)
    from lockstep.replay.verdict import RIGHT, TITLES, remarks, rows, sentence, to_json

    write_json(json_path, to_json(verdict))
    if json_path is None or str(json_path) != "-":
        click.echo(escaped_lines(sentence(verdict)))
        click.echo()
        print_table(TITLES, rows(verdict), right=RIGHT)
        click.echo()
        for remark in remarks(verdict):
            click.echo(escaped_lines(remark))
    sys.exit(NOTHING if verdict.finding is None else 0)
