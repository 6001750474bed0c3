"""Launching on a list of hosts: one ssh for each, which starts the ordinary launch there."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

from lockstep.config.hosts import Host
from lockstep.config.sources import inherited_environment
from lockstep.config.values import USUAL_PORT
from lockstep.errors import ConfigError
from lockstep.launch import node
from lockstep.launch.backend import SECRET, Command
from lockstep.launch.plan import LaunchPlan
from lockstep.launch.programs import Programs

# No questions, a bounded wait, and a connection whose other end is gone is noticed within 20 s.
SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15",
       "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4")  # fmt: skip
PORT = USUAL_PORT
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def commands(plan: LaunchPlan) -> list[Command]:
    """Return one command for each host, with the document that it reads."""
    return ssh_programs(plan, SECRET, inherited_environment(), os.getcwd())


def launch(plan: LaunchPlan) -> int:
    """Run a plan on all hosts and return the exit code of the launch.

    Raises:
        ConfigError: the first host has no name for the others, ssh is not installed, or the secret cannot be read.
    """
    from lockstep.launch.backend import secret_for_machines

    started = ssh_programs(plan, secret_for_machines(plan).hex(), inherited_environment(), os.getcwd())
    return Programs(started, plan.fault_policy.grace_s, plan.min_machines).run()


def ssh_programs(plan: LaunchPlan, secret: str, environ: Mapping[str, str], directory: str) -> list[Command]:
    """Return what is started for each host. Raises ConfigError when the machines could not meet."""
    hosts = plan.transport.hosts
    address, port = meeting_point(plan)
    found = []
    for rank, host in enumerate(hosts):
        own = replace(plan, machine_rank=rank, address=address, port=port)
        description = node.node_of(own, secret, environ, directory)
        found.append(
            Command(
                title=f"{host.target}, machine {rank} of {len(hosts)}",
                arguments=ssh_arguments(host),
                shown=_prefixed(host.name),
                stdin=description.line(),
            )
        )
    return found


def ssh_arguments(host: Host) -> tuple[str, ...]:
    """Return the argument list that starts a machine; one constant command for the shell at the other end."""
    start = (sys.executable, *node.ARGUMENTS)
    if is_here(host):
        return start
    return (*SSH, "--", host.target, shlex.join(start))


def is_here(host: Host) -> bool:
    """Return whether a host is this machine, under whatever name. A user's name says that ssh is wanted."""
    if host.user is not None:
        return False
    if host.name in LOOPBACK_NAMES or host.name == socket.gethostname():
        return True
    try:
        found = socket.getaddrinfo(host.name, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        # Not known here; ssh may know it by its own configuration.
        return False
    return any(_is_own(family, str(address[0])) for family, _, _, _, address in found)


def _is_own(family: int, address: str) -> bool:
    """Return whether an address is one of this machine: only such a one can be bound."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def meeting_point(plan: LaunchPlan) -> tuple[str | None, int | None]:
    """Address and port at which the hosts meet: as said, else the first host's name and a usual port.

    Raises:
        ConfigError: only this machine knows the first host by its name.
    """
    if plan.num_machines == 1:
        return plan.address, plan.port
    first = plan.transport.hosts[0]
    if plan.address is None and first.name in LOOPBACK_NAMES:
        raise ConfigError(
            f"hosts begins with {first.name}, but on each of the other {plan.num_machines - 1} machines this "
            "name means that machine itself. Write the name or address by which they reach this machine, or set "
            "--rdzv."
        )
    return plan.address or first.name, plan.port or PORT


def _prefixed(name: str) -> Callable[[bytes], bytes]:
    prefix = f"[{name}] ".encode()
    return lambda line: prefix + line
