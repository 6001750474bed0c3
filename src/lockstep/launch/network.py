"""Which of this machine's addresses a launch uses, and who holds a port."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING, NamedTuple

from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"


class RendezvousAddress(NamedTuple):
    """Where machines meet. ``master`` is the address of the machine that hosts; ``own`` and ``interface`` are this
    machine's way to it; ``here``: ``master`` is an address of this machine."""

    master: str
    own: str
    interface: str | None
    here: bool


def find_rendezvous_address(host: str, port: int, interface: str | None) -> RendezvousAddress:
    """Resolve ``main_process_ip`` and choose the interface that reaches it, or check the one that was named.

    Raises:
        ConfigError: the host is unknown or cannot be reached from here, or there is no such interface.
    """
    family, master = _resolved(host, port)
    addresses = own_addresses(family)
    # All of 127.0.0.0/8 is this machine, though an interface lists only one address of it.
    here = master in addresses.values() or (
        family == socket.AF_INET and ipaddress.ip_address(master).is_loopback
    )
    if here and ipaddress.ip_address(master).is_loopback and not _says_loopback(host):
        raise ConfigError(
            f"main_process_ip {host} is {master} on this machine, which other machines cannot reach. Give the "
            "address by which they reach this machine."
        )
    if interface is None:
        own = master if here else _source_address(family, master, port, host)
        names = [name for name, address in addresses.items() if address == own]
        return RendezvousAddress(master, own, names[0][0] if names else None, here)
    known = sorted({name for name, _ in own_addresses(socket.AF_INET)})
    mine = [address for (name, _), address in addresses.items() if name == interface]
    if not mine:
        raise ConfigError(
            f"interface {interface} has no address of the kind that main_process_ip has. Name one of these "
            f"interfaces: {', '.join(known)}."
        )
    if here and master not in mine and not ipaddress.ip_address(master).is_loopback:
        raise ConfigError(
            f"main_process_ip {host} is an address of this machine, but not one of interface {interface} "
            f"({', '.join(mine)}). Correct one of the two."
        )
    return RendezvousAddress(master, master if master in mine else mine[0], interface, here)


def own_addresses(family: socket.AddressFamily) -> dict[tuple[str, int], str]:
    """Return this machine's addresses of one family, by (interface, number)."""
    import psutil

    return {
        (name, number): entry.address.partition("%")[0]
        for name, entries in psutil.net_if_addrs().items()
        for number, entry in enumerate(entries)
        if entry.family == family
    }


def loopback_interface() -> str | None:
    """Return the name of the loopback, where it is the usual one."""
    names = [name for _, name in socket.if_nameindex()] if hasattr(socket, "if_nameindex") else []
    return "lo" if "lo" in names else None


def holder_of(port: int) -> str:
    """Return who listens on a port of this machine: ``pid 12 (python)``, or ``another process`` where that is
    hidden."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            taken = connection.status == psutil.CONN_LISTEN and tuple(connection.laddr)[1:2] == (port,)
            if taken and connection.pid is not None:
                return f"pid {connection.pid} ({psutil.Process(connection.pid).name()})"
    except (psutil.Error, OSError):
        pass
    return "another process"


def listening_socket(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on one address of this machine, and on no other.

    Raises:
        ConfigError: the port is taken, or the address is not of this machine.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # The port of a launch that has just ended here may be in TIME_WAIT.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen()
    except OSError as error:
        listener.close()
        if port == 0:
            raise ConfigError(
                f"Cannot listen on {address}: {error.strerror}. Name another --interface."
            ) from None
        raise ConfigError(
            f"main_process_port {port} cannot be used: {error.strerror}, by {holder_of(port)}. Leave it out to "
            "get a free port."
        ) from None
    return listener


def store_on(listener: socket.socket, address: str) -> TCPStore:
    """Make torch's store, in which ranks meet, on a socket that listens at this address already."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    port = listener.getsockname()[1]
    # From now on the descriptor is the store's.
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def free_port() -> int:
    """Return a port of this machine that nobody listens on now."""
    with listening_socket(LOOPBACK) as probe:
        return int(probe.getsockname()[1])


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"main_process_ip {host} is not known here: {reason}. Correct it, or give a numeric address."
        ) from None
    return found[0][0], str(found[0][4][0]).partition("%")[0]


def _says_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _source_address(family: socket.AddressFamily, master: str, port: int, host: str) -> str:
    """Return the address from which packets to the coordinator leave; nothing is sent."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, port))
        except OSError as error:
            raise ConfigError(
                f"main_process_ip {host} cannot be reached from here: {error.strerror}. Correct it, or repair "
                "the network."
            ) from None
        return str(probe.getsockname()[0])
