"""Authenticated JSON messages between launchers and workers, over TCP; the standard library only."""

from typing import TYPE_CHECKING

from lockstep.control.awake import AwakeClock
from lockstep.control.client import Client, SilentError
from lockstep.control.secret import Secret, derived, new_secret, read_secret, user_secret
from lockstep.control.server import ControlConnection, Handler, Server
from lockstep.lazy import names_of_modules

__all__ = [
    "AwakeClock",
    "Client",
    "ControlConnection",
    "Handler",
    "Secret",
    "Server",
    "SilentError",
    "derived",
    "new_secret",
    "read_secret",
    "user_secret",
]

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "server": ["MAX_QUEUED_BYTES"],
            "session": ["decode", "encode", "FrameReader", "FrameWriter", "name_of"],
        },
    )
