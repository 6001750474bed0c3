"""Authenticated JSON messages between launchers and workers, over TCP; the standard library only."""

from lockstep.link.client import Client
from lockstep.link.secret import Secret, derived, new_secret, read_secret, user_secret
from lockstep.link.server import Handler, Peer, Server

__all__ = [
    "Client",
    "Handler",
    "Peer",
    "Secret",
    "Server",
    "derived",
    "new_secret",
    "read_secret",
    "user_secret",
]
