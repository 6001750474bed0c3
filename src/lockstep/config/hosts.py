"""Lists of hosts: ``a,b:8``, and DeepSpeed's hostfile. Text in, values out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.config.files import read_regular_file
from lockstep.config.values import parse_host, parse_integer, repr_short
from lockstep.errors import ConfigError

MAX_SLOTS = 4096
MAX_HOSTS = 100_000
MAX_FILE_BYTES = 8 * 1024 * 1024
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
BRACKETED = re.compile(r"\[([^\]]*)\](?::(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Host:
    """A machine that ssh or mpirun reaches. ``slots``: how many processes it takes; None: not said."""

    name: str
    slots: int | None = None
    user: str | None = None

    @property
    def target(self) -> str:
        """``user@name``, or the name."""
        return self.name if self.user is None else f"{self.user}@{self.name}"

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        named = name if self.user is None else f"{self.user}@{name}"
        return named if self.slots is None else f"{named}:{self.slots}"


def parse_hosts(value: object) -> tuple[Host, ...]:
    """Parse ``a,me@b:8,[::1]:2``, or a list of such; after the colon the number of processes.

    Raises:
        ConfigError: an entry is not a host, or a host is there twice.
    """
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not parts or len(parts) > MAX_HOSTS:
        raise ConfigError(f"{repr_short(value)} is not a list of hosts such as a,b:8")
    return _distinct([parse_one(part) for part in parts])


def parse_one(value: object) -> Host:
    """Parse one host, with its user and its slots. Raises ConfigError."""
    if not isinstance(value, str) or len(value) > 400:
        raise ConfigError(f"{repr_short(value)} is not a host name or IP address")
    user, at, rest = value.strip().rpartition("@")
    if at and not USER.fullmatch(user):
        raise ConfigError(f"{repr_short(user)} in {repr_short(value)} is not a user name")
    bracketed = BRACKETED.fullmatch(rest)
    if bracketed is not None:
        name, slots = bracketed.group(1), bracketed.group(2)
    elif rest.count(":") == 1:
        name, slots = rest.split(":")
    else:
        name, slots = rest, None
    return Host(parse_host(name) or "", None if slots is None else _slots(slots), user if at else None)


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Return the hosts of a file with one ``name slots=N`` in a line; comments begin with ``#``.

    Lines ``name`` and ``name:N`` are understood too, which the hostfiles of MPI have, and a line ``name`` for each
    slot, as ``srun hostname`` prints them. What follows the slots (``max_slots=``) is of no use here.

    Raises:
        ConfigError: the file cannot be read, or a line is not a host; with file and line.
    """
    try:
        text = read_regular_file(path, MAX_FILE_BYTES + 1).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(
            f"hostfile {path}: cannot be read: {reason}. Check the path and its permissions, or name another file."
        ) from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"hostfile {path}: is larger than {MAX_FILE_BYTES} bytes. Name a list of hosts.")
    hosts: list[Host] = []
    lines: Counter[str] = Counter()
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _parse_line(words)
            if host.slots is None:
                lines[host.name] += 1
            if host.slots is not None or lines[host.name] == 1:
                hosts = list(_distinct([*hosts, host]))
        except ConfigError as error:
            raise ConfigError(f"{path}:{number}: {error}. Write a line such as: host1 slots=8") from None
    if not hosts:
        raise ConfigError(f"hostfile {path}: names no host. Write lines such as: host1 slots=8")
    if max(lines.values(), default=1) > 1:
        hosts = [host if host.slots else replace(host, slots=lines[host.name]) for host in hosts]
    return tuple(hosts)


def _parse_line(words: list[str]) -> Host:
    host = parse_one(words[0])
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key == "slots" and equals:
            if host.slots is not None:
                raise ConfigError(f"the slots of {host.name} are given twice")
            host = replace(host, slots=_slots(value))
        elif host.slots is None:
            raise ConfigError(f"{repr_short(word)} is not slots=N")
    return host


def _slots(text: str) -> int:
    try:
        return parse_integer(text, "", 1, MAX_SLOTS)
    except ConfigError:
        raise ConfigError(f"{repr_short(text)} is not a number of slots from 1 to {MAX_SLOTS}") from None


def _distinct(hosts: Sequence[Host]) -> tuple[Host, ...]:
    names = set()
    for host in hosts:
        if host.name in names:
            raise ConfigError(f"host {host.name} is given twice")
        names.add(host.name)
    return tuple(hosts)
