"""``lockstep report``: what a run did, why it was slow and why it stopped, on one page."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.config.files import replacing

if TYPE_CHECKING:
    from lockstep.report.report import RunReport

EPILOG = """\b
Examples:
  lockstep report runs/gpt
  lockstep report runs/gpt -o gpt.html
  lockstep report --json runs/gpt
\b
Exit codes: 0: the report was made, in whichever way the run ended. 2: RUN is not the folder of a run, or the page
cannot be written.
"""


@click.command("report", epilog=EPILOG)
@click.argument("run", metavar="RUN")
@click.option(
    "-o",
    "--output",
    metavar="FILE.html",
    help="Write the page here (default: report.html in the run's folder).",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the numbers as JSON; the page is written with -o only."
)
def command(run: str, output: str | None, as_json: bool) -> None:
    """Say what a run did, why it was slow and why it stopped, and write a page with its curves.

    RUN is the folder of a run (<project_dir>/run), or the folder of its project. The run may have crashed or may still
    run, and files may be missing.
    """
    from lockstep.report.report import report_of

    report = report_of(run, time.time())
    path = Path(output) if output is not None else None if as_json else report.default_path
    if path is not None:
        _write(path, report.page())
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
        return
    _print_report(report)
    click.echo(f"\n{click.format_filename(path)}" if path is not None else "")


def _print_report(report: RunReport) -> None:
    from lockstep.words import escape

    for place, (title, sentences) in enumerate(report.text()):
        click.echo(f"{chr(10) if place else ''}{escape(title)}")
        for sentence in sentences:
            click.echo(f"  {escape(sentence)}")


def _write(path: Path, page: str) -> None:
    """Whole or not at all: somebody may be looking at the page that was there."""
    try:
        if path.is_dir():
            raise click.UsageError(
                f"{str(path)[:200]!r} is a folder. Name a file, such as report.html, with -o."
            )
        with replacing(path) as file:
            file.write(page.encode())
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise click.UsageError(
            f"{str(path)[:200]!r} cannot be written: {reason}. Name another file with -o."
        ) from error
