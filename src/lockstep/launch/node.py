"""One machine of a launch that was started elsewhere: what ssh and srun run there.

    python -m lockstep.launch.node

Reads a document from its standard input, one line of JSON: the plan, the run's secret, the environment
and the working directory. Then it runs the ordinary local launch as one machine of several. Each later line
is the name of a signal, as if this launcher had got it. When the input closes, everything here ends: that is
how the end of the first launcher, by whatever signal, reaches this machine.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, BinaryIO

from lockstep.config.hosts import Host
from lockstep.config.settings import THREADS_VARIABLE
from lockstep.config.sources import SECRET_VARIABLE, export_environment, inherited_environment
from lockstep.config.values import parse_integer
from lockstep.errors import ConfigError, LockstepError
from lockstep.launch.backend import forwarded, without_secrets
from lockstep.launch.machines import Transport
from lockstep.launch.plan import FaultPolicy, LaunchPlan, available_cores

MAX_BYTES = 16 * 1024 * 1024


def plan_as_data(plan: LaunchPlan) -> dict[str, object]:
    """Return a plan in plain data, without the origins of its settings."""
    data = {item.name: getattr(plan, item.name) for item in fields(plan) if item.name != "settings"}
    return data | {"fault_policy": asdict(plan.fault_policy), "transport": asdict(plan.transport)}


def plan_from_data(data: Any) -> LaunchPlan:
    """Return the plan that ``plan_as_data`` wrote.

    Raises:
        ConfigError: it did not write this.
    """
    try:
        values = dict(data)
        fields = dict(values.pop("transport"))
        hosts = tuple(Host(**host) for host in fields.pop("hosts"))
        forward = tuple(fields.pop("forward_env"))
        command = tuple(values.pop("command"))
        fault_policy = FaultPolicy(**values.pop("fault_policy"))
        if not command or not all(isinstance(word, str) for word in command):
            raise TypeError("command")
        transport = Transport(hosts=hosts, forward_env=forward, **fields)
        return LaunchPlan(command=command, fault_policy=fault_policy, transport=transport, **values)
    except (TypeError, ValueError, KeyError, AttributeError):
        raise ConfigError(
            "The plan that this machine received is of another version of Lockstep. Install the same version on "
            "all machines."
        ) from None


def as_line(data: Mapping[str, object]) -> str:
    """JSON in one line of ASCII; names and arguments that are not UTF-8 survive it."""
    return json.dumps(data, ensure_ascii=True, allow_nan=False)


def from_line(line: bytes | str) -> dict[str, object]:
    """Return the object of a line; raises ConfigError when it is none."""
    try:
        data = json.loads(line) if len(line) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise ConfigError("The input of this program is not a plan. Start this program by `lockstep launch`.")
    return data


BAD_INPUT = 2
SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"})
ARGUMENTS = ("-m", "lockstep.launch.node")
SLURM = "slurm"


@dataclass(frozen=True)
class Node:
    """What one machine is told. ``numbered_by`` ``slurm``: its number and the meeting point are in the environment."""

    plan: LaunchPlan
    secret: str
    environment: Mapping[str, str]
    directory: str
    numbered_by: str = ""

    def line(self) -> str:
        """Return the document as one line of JSON."""
        return as_line(
            {
                "plan": plan_as_data(self.plan),
                "secret": self.secret,
                "environment": dict(self.environment),
                "directory": self.directory,
                "numbered_by": self.numbered_by,
            }
        )


def node_of(
    plan: LaunchPlan, secret: str, environ: Mapping[str, str], directory: str, numbered_by: str = ""
) -> Node:
    """Return what a machine of ``plan`` is told. With a placeholder as ``secret``, no other is in it either."""
    environment = forwarded(environ, plan.transport.forward_env)
    # There it is a local launch, which starts nothing on other machines.
    own = replace(plan, transport=Transport(), secret_file=None)
    if not is_hexadecimal(secret):
        environment = without_secrets(environment)
    return Node(own, secret, environment, directory, numbered_by)


def is_hexadecimal(text: str) -> bool:
    """Return whether a secret is a real one."""
    return re.fullmatch(r"[0-9a-f]+", text) is not None


def parse(line: bytes | str) -> Node:
    """Return the node that ``Node.line`` wrote; raises ConfigError."""
    data = from_line(line)
    plan = plan_from_data(data.get("plan"))
    secret, directory = data.get("secret"), data.get("directory")
    environment, numbered_by = data.get("environment"), data.get("numbered_by")
    texts: list[object] = [secret, directory, numbered_by]
    if isinstance(environment, dict):
        texts += [*environment, *environment.values()]
    if not isinstance(environment, dict) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            "The plan of this machine is not complete. Install the same version of Lockstep on all machines."
        )
    return Node(plan, str(secret), environment, str(directory), str(numbered_by))


def local_plan(node: Node, environ: Mapping[str, str], cores: int) -> LaunchPlan:
    """Return the plan of this machine, with its number, its threads, and where the machines meet.

    Raises:
        ConfigError: Slurm was to say its number, and does not.
    """
    plan = node.plan
    if THREADS_VARIABLE not in plan.environment:
        threads = {THREADS_VARIABLE: str(max(1, cores // plan.nproc))}
        plan = replace(plan, environment={**plan.environment, **threads})
    if node.numbered_by != SLURM or plan.num_machines == 1:
        return plan
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes or "SLURM_NODEID" not in environ:
        raise ConfigError("SLURM_NODEID or SLURM_STEP_NODELIST is not set here. Start this program by srun.")
    rank = parse_integer(environ["SLURM_NODEID"], "SLURM_NODEID", 0, plan.num_machines - 1)
    return replace(plan, machine_rank=rank, address=plan.address or first_host(nodes))


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list: ``gpu01`` of ``gpu[01-04,07],login``."""
    inside = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", nodes)
    return inside.split(",")[0].strip()


def obey(lines: BinaryIO) -> None:
    """Act on what arrives after the document, until the input closes."""
    for line in lines:
        name = line.decode("ascii", "replace").strip()
        if name in SIGNALS:
            os.kill(os.getpid(), signal.Signals[name])
    # The guard ends the workers, as it does whenever a launcher dies.
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Return the exit code of this machine's launch; 2 for what cannot be started."""
    lines = _taken_input()
    try:
        node = parse(lines.readline(MAX_BYTES))
        try:
            os.chdir(node.directory)
        except OSError as error:
            raise ConfigError(
                f"The working directory {node.directory} cannot be used here: {error.strerror}. Start the launch "
                "in a directory that all machines have."
            ) from None
        export_environment({**node.environment, SECRET_VARIABLE: node.secret})
        plan = local_plan(node, inherited_environment(), available_cores())
        threading.Thread(target=obey, args=(lines,), daemon=True, name="lockstep-obey").start()
        from lockstep.launch.local import launch

        return launch(plan)
    except LockstepError as error:
        sys.stderr.write(f"lockstep: error: {error}\n")
        return BAD_INPUT


def _taken_input() -> BinaryIO:
    """Return the standard input as a file of our own; the workers get an empty one."""
    lines = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return lines


if __name__ == "__main__":
    from lockstep.launch.local import end_process

    end_process(main())
