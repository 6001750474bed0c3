"""What runs on Ray: in each actor the user's command as a process of its own, one rank.

A process of its own, not a thread of Ray's worker: it is the real ``__main__``, gets signals, may fork
data-loader workers, and gives all its memory back at its end.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config.sources import RESTART_VARIABLE, inherited_environment
from lockstep.launch.backend import worker_arguments
from lockstep.launch.network import listening_socket, store_on
from lockstep.launch.report import read_error_file

# The key to the cluster is no business of the script.
NOT_FOR_SCRIPTS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class RayPlacement(NamedTuple):
    """Where Ray has put an actor: the machine, its address, and the GPUs that are the actor's."""

    node: str
    host: str
    gpus: tuple[str, ...]


class RayEnded(NamedTuple):
    """How a rank's process ended: its exit code (negative: a signal), and what its error file says."""

    rank: int
    exit_code: int
    report: Mapping[str, object]


@dataclass(frozen=True)
class Job:
    """What every rank runs, where, and with which variables beside those of its machine.

    ``python``: the command is what follows the interpreter, which is that of the worker.
    """

    command: tuple[str, ...]
    python: bool
    directory: str
    environment: Mapping[str, str]


class RankProcess:
    """An actor. ``stop`` is called while ``run`` waits."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._store: Any = None

    def place(self) -> RayPlacement:
        """Return where this is."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return RayPlacement(node, ray.util.get_node_ip_address(), tuple(map(str, ray.get_gpu_ids())))

    def host_store(self) -> tuple[str, int]:
        """Open the store in which the ranks meet, and return its host, as the cluster knows it, and port."""
        import ray

        host = ray.util.get_node_ip_address()
        self._store = store_on(listening_socket(host), host)
        return host, self._store.port

    def run(self, job: Job, rank: int, variables: Mapping[str, str]) -> RayEnded:
        """Run the command as one rank. Ray shows its output."""
        interpreter = [sys.executable] if job.python else []
        # Behind ``bare.py``, which ties its life to this process's.
        command = [sys.executable, *worker_arguments((*interpreter, *job.command))]
        environment = {"PYTHONUNBUFFERED": "1", **inherited_environment(), **job.environment, **variables}
        with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
            error_file = Path(folder) / "error.json"
            environment["TORCHELASTIC_ERROR_FILE"] = str(error_file)
            self._process = subprocess.Popen(
                command,
                cwd=job.directory,
                env={name: value for name, value in environment.items() if name not in NOT_FOR_SCRIPTS},
                stdin=subprocess.DEVNULL,
            )
            return RayEnded(rank, self._process.wait(), read_error_file(error_file))

    def stop(self) -> None:
        """Ask the process to stop at a step boundary."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)


def variables_of_ranks(
    places: Sequence[RayPlacement], restart: int
) -> tuple[list[int], list[dict[str, str]]]:
    """Return the actors in the order of their ranks, those of one machine in a row, and the variables of each rank.

    Ranks of one machine see all GPUs of that machine's actors, and take that of their local rank.
    """
    nodes = list(dict.fromkeys(place.node for place in places))
    order = sorted(range(len(places)), key=lambda actor: nodes.index(places[actor].node))
    found = []
    for rank, actor in enumerate(order):
        together = [other for other in order if places[other].node == places[actor].node]
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(together.index(actor)),
            "LOCAL_WORLD_SIZE": str(len(together)),
            "GROUP_RANK": str(nodes.index(places[actor].node)),
            # Ranks are clients of the store that rank 0's actor has opened already.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(restart),
            RESTART_VARIABLE: str(restart),
        }
        gpus = [gpu for other in together for gpu in places[other].gpus]
        found.append(variables | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}))
    return order, found
