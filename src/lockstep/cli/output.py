"""What commands print: tables and bars, of texts that may come from hostile files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal, if there is one; the function that is yielded takes bytes that were done."""
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
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=any(titles))
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(escape(text)) for text in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000
    console.print(table)


def escape(text: str) -> str:
    """Without control characters, which a hostile file could send to the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)
