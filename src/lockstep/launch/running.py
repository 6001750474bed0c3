"""The launches that run on this machine: where each can be reached, told by files in its own folder.

A launch keeps its secret in a file of a folder in the temporary directory, both of which its user alone can open.
Beside it stands where its coordinator listens. So another process of the same user finds both, and nobody else does.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.config.files import parse_json
from lockstep.config.values import parse_endpoint, parse_integer
from lockstep.control import Secret, read_secret
from lockstep.control.session import name_of
from lockstep.errors import ConfigError

PREFIX = "lockstep-"
SECRET, PLACE = "control", "launch.json"
MOST_BYTES = 64 * 1024


@dataclass(frozen=True)
class RunningLaunch:
    """One launch. ``launch_id``: what its workers find in LOCKSTEP_LAUNCH_ID; ``run`` describes it."""

    launch_id: str
    address: tuple[str, int]
    run: str
    pid: int
    secret: Secret = field(repr=False)


def make_work_folder() -> str:
    """Return a folder for one launch, which nobody but its user can open."""
    return tempfile.mkdtemp(prefix=PREFIX)


def write_place(folder: str, launch_id: str, address: tuple[str, int], run: str, secret: Secret) -> str:
    """Write down where a launch can be reached; returns the path of the file that has the secret alone."""
    path = os.path.join(folder, SECRET)
    place = {"launch_id": launch_id, "address": name_of(address), "run": run, "pid": os.getpid()}
    _write(path, secret.hex())
    _write(os.path.join(folder, PLACE), json.dumps(place))
    return path


def running_launches() -> list[RunningLaunch]:
    """Return the launches of this user on this machine; whatever else has such a name is passed over."""
    try:
        folders = sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
    except OSError:
        return []
    return [launch for folder in folders if (launch := _launch_in(folder)) is not None]


def with_address(address: tuple[str, int]) -> RunningLaunch | None:
    """Return the launch of this user that is reached there."""
    asked = _addresses(address[0])
    for launch in running_launches():
        if launch.address[1] == address[1] and asked & _addresses(launch.address[0]):
            return launch
    return None


def _launch_in(folder: Path) -> RunningLaunch | None:
    try:
        status = os.lstat(folder)
        # Anybody can make such a folder: believed is only one of the user's own that is closed to others.
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            return None
        with open(folder / PLACE, encoding="utf-8") as file:
            place = parse_json(file.read(MOST_BYTES), str(folder / PLACE))
        launch = RunningLaunch(
            launch_id=str(place["launch_id"]),
            address=parse_endpoint(place["address"]),
            run=str(place["run"]),
            pid=parse_integer(place["pid"], "pid", at_least=1),
            secret=read_secret(folder / SECRET),
        )
        # One that was killed leaves its folder behind.
        os.kill(launch.pid, 0)
        return launch
    except (OSError, ValueError, KeyError, TypeError, OverflowError, ConfigError):
        return None


def _addresses(host: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return {host}


def _write(path: str, text: str) -> None:
    # With its mode from the start, so that no moment is left in which others could read it.
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
