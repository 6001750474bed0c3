"""Files of JSON lines that a run may still write, or was killed while it wrote."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

# Reads a line in a third of the time of json.loads.
from pydantic_core import from_json

MEASURES, EVENTS = "measures.jsonl", "events.jsonl"
"""The files of a run's folder."""
BLOCK = 1 << 17
"""Bytes that are read at a time: so many that what becomes of them stays in the processor's caches."""
LONGEST_LINE = 1 << 26


def json_lines(path: Path, newest: int | None = None) -> Iterator[list[dict[str, object]]]:
    """Yield the objects of a file, block by block and in order; lines that hold no whole object are left out.

    A file that is not there, or is no plain file, has none. ``newest``: read no more than its last bytes, so many.
    """
    if not _is_plain(path):
        return
    with open(path, "rb") as file:
        if newest is not None:
            # The line in which this begins is no whole object, and left out.
            file.seek(max(0, os.fstat(file.fileno()).st_size - newest))
        rest: list[bytes] = []
        while block := file.read(BLOCK):
            whole, newline, tail = block.rpartition(b"\n")
            if newline:
                yield _objects(b"".join([*rest, whole]))
                rest = []
            rest.append(tail)
            # A file of garbage may have no end of a line: it must not fill the memory.
            if len(rest) > LONGEST_LINE // BLOCK:
                rest = [b"#"]
        if any(rest):
            yield _objects(b"".join(rest))


def read_lines(path: Path) -> Iterator[dict[str, object]]:
    """Yield the same, one by one."""
    for block in json_lines(path):
        yield from block


def _is_plain(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode) and os.access(path, os.R_OK)
    except (OSError, ValueError):
        # ValueError is of a NUL in the name.
        return False


def _objects(block: bytes) -> list[dict[str, object]]:
    return [found for line in block.split(b"\n") if line and type(found := _parse(line)) is dict]


def _parse(line: bytes) -> object:
    try:
        return from_json(line)
    except ValueError:
        pass
    try:
        # Some byte of a text may not be UTF-8.
        return from_json(line.decode("utf-8", "replace"))
    except ValueError:
        return None
