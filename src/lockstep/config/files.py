"""Files that may be anything, read as plain files only: settings, JSON, and what lies in a folder that others filled.

Opening a pipe waits for a writer, a device may never end, and a link may lead anywhere.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeAlias

from lockstep.config.values import plain, repr_short
from lockstep.errors import CheckpointError, ConfigError

JsonObject: TypeAlias = dict[str, Any]
"""What is in it is checked where it is read."""

KINDS = {
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_regular_file(path: str | Path, limit: int) -> bytes:
    """Return the first ``limit`` bytes of a file.

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
    """Return the whole configuration file, in ``language`` ("JSON").

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
            f"{path}: the file is larger than {most_bytes} bytes, so it cannot be a configuration file. Check "
            "its path."
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
        raise OSError(errno.EINVAL, f"it is {kind}, but must be a plain file", str(path))


_OF_THE_SYSTEM = ("/proc/", "/sys/")
"""What lies there looks like files, but is made by the kernel while it is read."""


def check_plain_file(path: str) -> None:
    """Raise CheckpointError if ``path`` is, or is a link to, anything but a plain file; it is not opened.

    Raises:
        OSError: there is nothing.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise _refused(path, KINDS.get(stat.S_IFMT(mode), "no plain file"))
    if os.path.realpath(path).startswith(_OF_THE_SYSTEM):
        raise _refused(path, "a file that the system makes while it is read")


def check_shard(folder: str, name: str) -> None:
    """Check a ``name`` that an index in ``folder`` gives, as ``check_plain_file`` does; it must not lead out of the
    folder.

    Links into the ``blobs`` beside ``snapshots`` do not: such is the cache of the Hugging Face Hub.

    Raises:
        OSError: there is nothing.
    """
    path = os.path.join(folder, name)
    check_plain_file(path)
    here, there = os.path.realpath(folder), os.path.realpath(path)
    inside = [here]
    if os.path.basename(os.path.dirname(here)) == "snapshots":
        inside.append(os.path.join(os.path.dirname(os.path.dirname(here)), "blobs"))
    if not any(os.path.commonpath([place, there]) == place for place in inside):
        raise CheckpointError(
            f"{path} is a link to {there}, outside its folder. Replace the link by a copy of the file (cp -L), "
            "or name the file directly."
        )


def read_plain_file(path: str, limit: int) -> bytes:
    """Return the content of a plain file, of at most ``limit`` bytes.

    Raises:
        OSError: it cannot be opened.
        CheckpointError: it is no plain file, or larger.
    """
    check_plain_file(path)
    content = read_regular_file(path, limit + 1)
    if len(content) > limit:
        size = os.path.getsize(path)
        raise CheckpointError(
            f"{path} has {size} bytes, but at most {limit} are read. Check that this is the right file."
        )
    return content


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Write a file that takes the place of ``path`` when the block ends; if the block fails, nothing changes.

    Until then the file is beside ``path``. Its name cannot be guessed and must be new: whoever can write into the
    folder may have put links there.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(path)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with open(beside, "xb") as file:
        try:
            yield file
            file.flush()
            os.replace(beside, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(beside)
            raise


def _refused(path: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is {kind}, where a plain file is needed. Copy or download the file again."
    )


MAX_FILE_BYTES = 256 * 1024
MAX_DEPTH = 16


def read_json(path: str | Path) -> dict[str, object]:
    """Read a file that holds one JSON object.

    Raises:
        ConfigError: the file is missing, unreadable, not UTF-8 text, too large or too deep, not JSON, or has a
            duplicate key, NaN or infinity.
    """
    name = str(path)
    text = read_text(path, MAX_FILE_BYTES, "JSON")
    return parse_json(text, name)


def parse_json(text: str, name: str) -> dict[str, object]:
    """Read a JSON text as :func:`read_json` reads a file; ``name`` appears in messages."""
    try:
        data = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{name}:{error.lineno}: not valid JSON: {error.msg}. Correct this line (comments are not allowed)."
        ) from None
    except RecursionError:
        raise ConfigError(
            f"{name}: the configuration is nested too deep. Write a flat configuration."
        ) from None
    except ValueError as error:  # ours, from the hooks; and that of int() on thousands of digits
        reason = str(error) if isinstance(error, ConfigError) else "a number has too many digits"
        raise ConfigError(f"{name}: {reason.rstrip('.')}. Correct it.") from None
    if not isinstance(data, dict):
        raise ConfigError(
            f"{name}: the top level must be an object {{...}}, not {repr_short(data)}. Correct it."
        )
    check_depth(data, name)
    return data


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    data: dict[str, object] = {}
    for key, value in pairs:
        if key in data:
            raise ConfigError(f"the key {repr_short(key)} is given twice")
        data[key] = value
    return data


def _constant(word: str) -> NoReturn:
    raise ConfigError(f"{word} is not a value of JSON")


def check_depth(data: object, where: str, depth: int = 0) -> None:
    """Raise ConfigError when mappings and lists are nested too deep, as one that contains itself is."""
    if depth > MAX_DEPTH:
        raise ConfigError(
            f"{where}: the configuration is nested deeper than {MAX_DEPTH} levels. Write a flat configuration."
        )
    if isinstance(data, Mapping):
        for value in data.values():
            check_depth(value, where, depth + 1)
    elif isinstance(data, (list, tuple)):
        for value in data:
            check_depth(value, where, depth + 1)
