"""Where the workers of a launch meet: on the loopback for one machine, by torch's handlers for several."""

from __future__ import annotations

import socket
import uuid

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

from lockstep.errors import ConfigError
from lockstep.launch.plan import LaunchPlan

LOOPBACK = "127.0.0.1"
JOIN_TIMEOUT_S = 900


class LoopbackRendezvous(RendezvousHandler):
    """One machine: a store whose socket is bound to the loopback, shared with the workers.

    The socket is bound before anyone is told its port, so a free port cannot be taken meanwhile.
    """

    def __init__(self, port: int = 0) -> None:
        self._port = port
        self._run_id = uuid.uuid4().hex
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """A new store for each round; raises ConfigError when the requested port is taken."""
        self._store = None  # frees a fixed port before it is bound again
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, self._port))
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"main_process_port {self._port} cannot be used: {error.strerror}. Leave it out to get a free one."
            ) from None
        listener.listen()
        port = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """One machine has nobody to tell."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True


def rendezvous_handler(plan: LaunchPlan) -> RendezvousHandler:
    """The handler for a plan: ours on one machine, else torch's ``static`` or ``c10d``."""
    if plan.num_machines == 1:
        return LoopbackRendezvous(plan.port or 0)
    from torch.distributed.elastic.rendezvous import registry

    parameters = RendezvousParameters(
        backend=plan.rdzv_backend,
        endpoint=f"{_bracketed(plan.address or '')}:{plan.port}",
        run_id=f"lockstep-{plan.port}",
        min_nodes=plan.num_machines,
        max_nodes=plan.num_machines,
        rank=plan.machine_rank,
        timeout=JOIN_TIMEOUT_S,
    )
    return registry.get_rendezvous_handler(parameters)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
