"""What commands print: tables and bars, of texts that may come from hostile files."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.words import escape

if TYPE_CHECKING:
    from rich.table import Table

ERROR = "lockstep: error: "
UNBROKEN = 1000
"""Columns of what is not printed on a terminal."""


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a bar on the terminal, if there is one; the function that is yielded takes bytes that were done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(escape(what), total=total)
        yield lambda count: bar.advance(task, count)


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> None:
    """Print a table, with the columns ``right`` set to the right. Not on a terminal, no line is broken."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = UNBROKEN
    console.print(_table(titles, rows, right))


def table_text(titles: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> str:
    """Return the same as text, without a line's end behind it."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=UNBROKEN, highlight=False, force_terminal=False)
    with console.capture() as captured:
        console.print(_table(titles, rows, right))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=any(titles))
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(escape(text)) for text in row))
    return table


@contextmanager
def kept_folder(command: str, keep: Path | None) -> Iterator[Path]:
    """Return where a command has its files: ``keep``, a new folder; None: one that is removed."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix=f"lockstep-{command}-") as folder:
            yield Path(folder)
        return
    try:
        keep.mkdir(parents=True)
    except FileExistsError:
        raise click.UsageError(f"--keep {keep} is there already. Name a new folder.") from None
    yield keep


def write_json(path: Path | None, report: Mapping[str, object]) -> None:
    """Write JSON to a file; "-" is standard output, None nowhere."""
    if path is None:
        return
    text = json.dumps(report, indent=2)
    if str(path) == "-":
        click.echo(text)
    else:
        path.write_text(text + "\n", "utf-8")
