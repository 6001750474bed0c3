"""Which machines a launch starts, and how it reaches them: from settings, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.config.checks import HOST_LISTS, LOCAL, ValuesByName, backend_of
from lockstep.config.hosts import Host, parse_hosts, read_hostfile
from lockstep.config.values import SettingValue, parse_integer
from lockstep.errors import ConfigError

SettingValues = dict[str, SettingValue]

ALLOCATED_NODES = "SLURM_JOB_NUM_NODES"


@dataclass(frozen=True)
class Transport:
    """How the machines are reached: the ``backend`` (a name of ``launch.backends``) and its own settings.

    ``hosts`` belong to the backends ``hosts`` and ``mpi``, ``options`` to ``slurm`` and ``k8s``. ``kind`` is
    the Kubernetes resource, ``output`` the file for its manifests. ``forward_env``: further environment names
    that travel to other machines.
    """

    backend: str = LOCAL
    hosts: tuple[Host, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    kind: str | None = None
    output: str | None = None
    forward_env: tuple[str, ...] = ()


def transport_of(value: ValuesByName, output: str | None = None) -> Transport:
    """Return the part of the settings (name -> value) that says how machines are reached.

    Raises:
        ConfigError: two ways are asked for, or the list of hosts cannot be read.
    """
    backend = backend_of(value)
    return Transport(
        backend=backend,
        hosts=hosts_of(value),
        options=value.get(f"{backend}_options") or {},
        kind=value.get("k8s"),
        output=output,
        forward_env=tuple(value.get("forward_env") or ()),
    )


def hosts_of(value: ValuesByName) -> tuple[Host, ...]:
    """Return the hosts that are named in a list or in a file."""
    if value.get("hosts"):
        return parse_hosts(value["hosts"])
    return read_hostfile(value["hostfile"]) if value.get("hostfile") else ()


def machines_of(
    settings: SettingValues, nproc: SettingValue | None, environ: Mapping[str, str]
) -> SettingValues:
    """Return numbers of machines and processes where the list of hosts, or Slurm's allocation, says them.

    Raises:
        ConfigError: they contradict what else was said.
    """
    value = {name: setting.value for name, setting in settings.items()}
    backend = backend_of(value)
    hosts = hosts_of(value)
    if hosts:
        listed = next(name for name in HOST_LISTS if value[name])
        return _listed(settings, hosts, settings[listed]._replace(value=listed), nproc)
    found: SettingValues = {}
    if backend == "slurm" and settings["num_machines"].source == "default" and environ.get("SLURM_JOB_ID"):
        count = allocated_nodes(environ)
        if count is not None:
            found["num_machines"] = SettingValue(count, f"environment variable {ALLOCATED_NODES}")
    return found


def allocated_nodes(environ: Mapping[str, str]) -> int | None:
    """Return the number of nodes of Slurm's allocation, if it says one. Raises ConfigError if that is no number."""
    given = environ.get(ALLOCATED_NODES)
    return parse_integer(given, ALLOCATED_NODES, at_least=1) if given else None


def _listed(
    settings: SettingValues, hosts: tuple[Host, ...], where: SettingValue, nproc: SettingValue | None
) -> SettingValues:
    given = settings["num_machines"]
    if given.source != "default" and given.value != len(hosts):
        raise ConfigError(
            f"num_machines is {given.value}, but {where.value} names {len(hosts)} ({where.source}). "
            "Correct one of them."
        )
    found = {"num_machines": SettingValue(len(hosts), where.source)}
    slots = {host.slots for host in hosts if host.slots is not None}
    if nproc is not None or settings["num_processes"].value is not None:
        total = settings["num_processes"].value
        each = nproc.value if nproc is not None else -(-total // len(hosts))
        if slots and each > min(slots):
            raise ConfigError(
                f"num_processes is {each} for each machine, but {where.value} has a host with {min(slots)} slots "
                f"({where.source}). Use fewer processes, or correct the slots."
            )
    elif len(slots) == 1 and all(host.slots for host in hosts):
        found["num_processes"] = SettingValue(slots.pop() * len(hosts), f"slots of {where.source}")
    elif slots:
        raise ConfigError(
            f"{where.value} gives its hosts different numbers of slots ({where.source}), but every machine must "
            "run the same number of processes. Set --nproc, or write equal slots."
        )
    return found


def check_counted(settings: SettingValues) -> None:
    """Raise ConfigError when only the other machines could know how many processes to start."""
    value = {name: setting.value for name, setting in settings.items()}
    backend = backend_of(value)
    if backend != LOCAL and value["num_processes"] is None:
        raise ConfigError(
            "num_processes is not set, and this machine does not know how many GPUs the others have. Set "
            "--nproc for each machine, or num_processes for all."
        )
