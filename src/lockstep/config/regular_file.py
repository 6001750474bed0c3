"""Reads files of settings, and never waits: opening a pipe waits for a writer."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from lockstep.config.values import plain
from lockstep.errors import ConfigError

KINDS = {
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_regular_file(path: str | Path, limit: int) -> bytes:
    """The first ``limit`` bytes of a file.

    Raises:
        OSError: it cannot be opened, or is a pipe, a folder, a device or a socket.
        ValueError: the path holds a NUL.
    """
    # looked at before it is opened: opening alone may wind a tape or start a watchdog
    _check(os.stat(path).st_mode, path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        _check(os.fstat(descriptor).st_mode, path)  # it may have been replaced meanwhile
        return file.read(limit)


def read_text(path: str | Path, most_bytes: int, language: str) -> str:
    """The whole configuration file, in ``language`` ("JSON").

    Raises:
        ConfigError: it is missing, unreadable, larger than ``most_bytes``, or not UTF-8 text.
    """
    try:
        content = read_regular_file(path, most_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path}: cannot read the configuration file: {reason}. Check its path.") from None
    if len(content) > most_bytes:
        raise ConfigError(
            f"{path}: larger than {most_bytes} bytes, so not a configuration file. Check its path."
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text. Give a {language} file.") from None


def check_readable(path: str, origin: str) -> None:
    """Raise ConfigError, with the name of what says the path, unless it is a file that can be read."""
    try:
        read_regular_file(os.path.expanduser(path), 0)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{origin}={plain(path, 200)} cannot be read: {reason}. Name a file that can be, or unset {origin}."
        ) from None


def _check(mode: int, path: str | Path) -> None:
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, and not a plain file", str(path))
