"""The coordinator of a run that our launcher did not start: rank 0 hosts it, and invites the other ranks."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.distributed as dist

from lockstep.config.sources import process_environment
from lockstep.control import Secret, Server, new_secret
from lockstep.errors import ControlError
from lockstep.observe.hang.coordinator import Coordinator
from lockstep.observe.hang.hangs import WatchSettings
from lockstep.observe.hang.worker import nothing_to_save, say
from lockstep.runtime import failure

LOOPBACK = "127.0.0.1"
INVITATION_BYTES = 512


class CoordinatorHost:
    """The coordinator and its server, in a thread of rank 0."""

    def __init__(self) -> None:
        self.secret = new_secret()
        self._coordinator = Coordinator(WatchSettings(), say)
        self._server: Server | None = None

    def invitation(self) -> bytes:
        """Start the server, and return its address and secret as words; empty if it cannot start."""
        name = process_environment(need_rendezvous=False).master_addr or LOOPBACK
        try:
            self._server = Server(
                self.secret, name, handlers={"watch": _EndingCoordinator(self._coordinator)}
            )
            self._server.start()
            host, port = self._server.address[:2]
            return f"{host} {port} {self.secret.hex()}".encode()
        except (ControlError, OSError, ValueError) as error:
            # The ranks still hear that there is none.
            say(f"hangs of this run will not be found: {error}")
            return b""

    def close(self) -> None:
        """Let the other ranks hear of this one's end before the coordinator ends with it."""
        if self._server is not None:
            with suppress(ControlError):
                self._server.call(self._report_own_end)
            self._server.close()

    def _report_own_end(self) -> None:
        if not failure.has_failed():
            self._coordinator.left(0)


def exchange_address(
    host: CoordinatorHost | None, device: torch.device
) -> tuple[tuple[str, int], Secret] | None:
    """Return the address and the secret of rank 0's coordinator, or None if it has none. Collective.

    The secret travels through the process group, whose members are those who may know it.
    """
    invitation = torch.zeros(INVITATION_BYTES, dtype=torch.uint8)
    if host is not None:
        text = host.invitation()
        invitation[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    invitation = invitation.to(device)
    dist.broadcast(invitation, src=0)
    words = bytes(invitation.cpu().tolist()).rstrip(b"\0").decode().split(" ")
    return ((words[0], int(words[1])), Secret.from_hex(words[2])) if len(words) == 3 else None


class _EndingCoordinator:
    """A coordinator whose verdict ends the run: the workers themselves, because no launcher of ours can."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._has_said = False
        self.received, self.lost = coordinator.received, coordinator.lost

    def tick(self, now: float) -> None:
        self._coordinator.tick(now)
        if self._coordinator.verdict is not None:
            self._coordinator.end_all("hang")
        if self._coordinator.nothing_begun and not self._has_said:
            self._has_said = True
            say(f"{nothing_to_save(self._coordinator.stop_cause)}.")
