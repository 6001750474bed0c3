"""Authenticated JSON messages between launchers and workers, over TCP; the standard library only."""

from lockstep.control.client import Client
from lockstep.control.secret import Secret, derived, new_secret, read_secret, user_secret
from lockstep.control.server import ControlConnection, Handler, Server

__all__ = [
    "Client",
    "ControlConnection",
    "Handler",
    "Secret",
    "Server",
    "derived",
    "new_secret",
    "read_secret",
    "user_secret",
]
