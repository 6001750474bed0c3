"""What every socket of a link has in common."""

from __future__ import annotations

import errno
import os
import socket
import weakref
from typing import Protocol

from lockstep.errors import ConfigError

BACKLOG = 1024
KEEPALIVE_S = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class HoldsSockets(Protocol):
    """Whoever must let go of its sockets in a forked child."""

    def _close_in_child(self) -> None: ...


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens on this address alone, and does not block.

    Raises:
        ConfigError: the host is not an address of this machine, or the port is taken or not allowed.
    """
    where = name_of((host, port))
    if not host:
        raise ConfigError("No address to listen on was named, and every address is too many. Name one.")
    if not 0 <= port <= 65535:  # the system would take the remainder
        raise ConfigError(f"Cannot listen on {where}: ports are 0 to 65535. Correct the port.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"Cannot listen on {where}: {reason_of(error)}. Correct the address.") from None
    try:
        # After a restart; never beside another.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        listener.close()
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {port} of {host} is taken by another process. Choose another port, or end that process."
            ) from None
        raise ConfigError(
            f"Cannot listen on {where}: {reason_of(error)}. Name an address of this machine and a port that may "
            f"be used."
        ) from None
    return listener


def tune(connection: socket.socket) -> None:
    """Small messages leave at once; a machine that vanished is noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE_S:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def close_after_fork(holder: HoldsSockets) -> None:
    """Have a forked child close its copies: the other end must see the loss when this process ends."""
    reference = weakref.ref(holder)

    def close_copies() -> None:
        alive = reference()
        if alive is not None:
            alive._close_in_child()

    os.register_at_fork(after_in_child=close_copies)


def name_of(address: tuple[str, int]) -> str:
    """``host:port`` for a message."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reason_of(error: Exception) -> str:
    """What happened, for a message: the system's words without its error number."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).rstrip(".")
