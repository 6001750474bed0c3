"""Where the ranks' output goes: the console, or files in a directory."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TextIO

from lockstep.launch.backend import make_log_folder, say
from lockstep.launch.ray_cluster.record import RayOutput


class Console:
    """Writes ``rank-N.out`` and ``rank-N.err`` if there is a directory; with ``tee`` the console shows it too.

    ``files`` has the path of each rank's ``.err``.

    Raises:
        ConfigError: the directory cannot be made.
    """

    def __init__(self, log_dir: str | None, tee: bool) -> None:
        self._directory = None if log_dir is None else Path(log_dir)
        self._tee = tee
        self._open: dict[tuple[int, str], TextIO] = {}
        self.files: dict[int, str] = {}
        make_log_folder(log_dir)

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            file.close()

    def show(self, outputs: Iterable[RayOutput]) -> None:
        """Write what the ranks wrote, in the order in which it came."""
        for rank, stream, text in outputs:
            if self._directory is not None:
                self._file(self._directory, rank, stream).write(text)
            if self._directory is None or self._tee:
                console = sys.stdout if stream == "out" else sys.stderr
                console.write(text)
                console.flush()

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self.say_lines(f"lockstep launch: {text}")

    def say_lines(self, text: str) -> None:
        """Lines of the launcher's own, complete."""
        for file in self._open.values():
            file.flush()
        say(text)

    def _file(self, directory: Path, rank: int, stream: str) -> TextIO:
        if (rank, stream) not in self._open:
            path = directory / f"rank-{rank}.{stream}"
            self._open[rank, stream] = path.open("w", encoding="utf-8")
            if stream == "err":
                self.files[rank] = str(path)
        return self._open[rank, stream]
