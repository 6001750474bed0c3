"""Authenticated JSON messages between launchers and workers, over TCP; the standard library only."""

from lockstep.link.client import Client
from lockstep.link.secret import Secret, derived, new_secret, read_secret, user_secret
from lockstep.link.server import ControlConnection, Handler, Server

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
