"""Hosting a launch: the server with the coordinator's two handlers, in a thread of the launcher."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress

from lockstep.control import AwakeClock, Handler, Secret, Server
from lockstep.errors import ConfigError, ControlError
from lockstep.launch.coordinator import LaunchCoordinator
from lockstep.launch.membership import Membership
from lockstep.launch.network import holder_of
from lockstep.launch.plan import LaunchPlan
from lockstep.launch.report import Restarts
from lockstep.observe.hang.coordinator import Coordinator
from lockstep.observe.hang.hangs import WatchSettings

# How long the others' launchers have to read why the launch ended, and to end their workers.
LEAVE_LIMIT_S = 3.0
MOST_NAMED = 16


class CoordinatorServer:
    """The coordinator of a plan's launch, listening at ``address:port``.

    Args:
        machine: identity of the launcher that hosts.
        run: describes the launch, the same on all its machines.
        say: prints one sentence for people.

    Raises:
        ConfigError: the port is taken, or the address is not of this machine.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        secret: Secret,
        address: str,
        port: int,
        machine: str,
        run: str,
        say: Callable[[str], None],
    ) -> None:
        clock = AwakeClock()
        members = Membership(
            least=min(plan.min_machines, plan.num_machines),
            most=plan.num_machines,
            epoch=uuid.uuid4().hex,
            run=run,
            first=machine,
            now=clock(),
            last_call_s=plan.fault_policy.last_call_s,
            join_limit_s=plan.fault_policy.join_timeout_s,
            heartbeat_limit_s=plan.fault_policy.heartbeat_limit_s,
        )
        watched = plan.fault_policy.watch
        limits = WatchSettings(hang_timeout_s=plan.fault_policy.hang_timeout_s)
        self._watch = coordinator = Coordinator(limits, self._say_of_run)
        self._say, self._refused_addresses = say, set[str]()
        self._coordinator = LaunchCoordinator(
            members,
            Restarts(plan.fault_policy.max_restarts),
            coordinator if watched else None,
            grace_s=plan.fault_policy.grace_s,
            elastic=plan.elastic,
            say=say,
            clock=clock,
        )
        handlers: dict[str, Handler] = {"rendezvous": self._coordinator}
        if watched:
            handlers["watch"] = coordinator
        try:
            self._server = Server(secret, address, port, handlers, self._secret_refused, clock)
        except ConfigError as error:
            if port and "taken" in str(error):
                raise ConfigError(
                    f"main_process_port {port} cannot be used: {holder_of(port)} listens there. Choose another port, "
                    f"or end that process."
                ) from None
            raise
        self.address = self._server.address
        self._server.start()

    def _say_of_run(self, sentence: str) -> None:
        self._say(f"lockstep: {sentence}")

    def _secret_refused(self, address: str) -> None:
        if address not in self._refused_addresses and len(self._refused_addresses) < MOST_NAMED:
            self._refused_addresses.add(address)
            self._say(
                f"lockstep: {address} was refused: it has another secret. Give every machine the same "
                "--secret-file or LOCKSTEP_SECRET."
            )

    def latest(self) -> Mapping[str, float | str]:
        """See ``Coordinator.latest``. Does not wait for the thread of the handlers."""
        return self._watch.latest()

    def interrupt(self, name: str, code: int) -> None:
        """End the launch on all machines with this code, because this one got a signal."""
        with suppress(ControlError):
            self._server.call(lambda: self._coordinator.interrupt(name, code))

    def close(self) -> None:
        """Stop, once the others have heard how the launch ended."""
        deadline = time.monotonic() + LEAVE_LIMIT_S
        with suppress(ControlError):
            while not self._server.call(self._coordinator.alone) and time.monotonic() < deadline:
                time.sleep(0.01)
        self._server.close()
