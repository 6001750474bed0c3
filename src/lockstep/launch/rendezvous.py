"""A launcher's end of the rendezvous: it joins, hears which round it is in, and tells what happens."""

from __future__ import annotations

import math
import platform
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from lockstep.config.files import JsonObject
from lockstep.control import AwakeClock, Client, Secret, SilentError
from lockstep.control.session import name_of
from lockstep.errors import ConfigError, ControlError
from lockstep.launch.membership import HEARTBEAT_LIMIT_S, JOIN_LIMIT_S
from lockstep.launch.network import listening_socket

HEARTBEAT_S = 1.0
CONNECT_S = 5.0
RETRY_S = 0.25
SAY_WAITING_AFTER_S = 1.0
REFUSED_LIMIT_S = 15.0
REJOIN_LIMIT_S = 60.0


@dataclass(frozen=True)
class Round:
    """This machine's place in a round; ``listener`` is the socket of the round's store, where it is hosted here."""

    number: int
    group_rank: int
    base_rank: int
    machines: int
    world_size: int
    address: str
    port: int
    listener: socket.socket | None = None


@dataclass(frozen=True)
class LaunchEnded:
    """The launch has ended: its exit code, why, what else there is to say, and the rank to blame, if there is one."""

    code: int
    cause: str
    note: str = ""
    rank: int | None = None


class CoordinatorLost(ControlError):
    """The machine that hosts the launch is gone."""


@dataclass(frozen=True)
class LauncherIdentity:
    """What a launcher says of itself; see ``membership.JoinRequest``. ``store_port`` 0: a free one."""

    run: str
    nproc: int
    rank: int | None
    own_address: str
    store_port: int = 0


class Rendezvous:
    """A connection to the coordinator.

    Args:
        address: the coordinator's.
        secret: the run's.
        identity: this machine.
        say: prints one sentence for people.
        machine: identity of this launcher, made up if empty.
        coordinator_limit_s: how long to wait for a coordinator that does not answer yet.
        heartbeat_limit_s: how long its silence may last, while this process was awake; None: it is in this process.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: Secret,
        identity: LauncherIdentity,
        say: Callable[[str], None],
        machine: str = "",
        coordinator_limit_s: float = JOIN_LIMIT_S,
        heartbeat_limit_s: float | None = HEARTBEAT_LIMIT_S,
    ) -> None:
        self._address, self._secret, self._identity = address, secret, identity
        self._say = say
        self._machine = machine or uuid.uuid4().hex
        self._epoch = ""
        self._has_reported_wait = False
        self._listener: socket.socket | None = None
        self._heartbeat_limit_s = math.inf if heartbeat_limit_s is None else heartbeat_limit_s
        self._client = self._connected(coordinator_limit_s)
        self._clock = AwakeClock()
        self._last_message = 0.0
        self._ended = threading.Event()
        # Heartbeats come from a thread of their own: ending workers may keep the main one busy for seconds.
        threading.Thread(target=self._heartbeat, name="lockstep-heartbeat", daemon=True).start()

    # -- rounds --------------------------------------------------------------------------------------

    def join(self, check: Callable[[], None]) -> Round | LaunchEnded:
        """Wait for the next round; ``check`` is called a few times a second and may raise.

        Raises:
            ConfigError: the coordinator does not let this machine in.
            CoordinatorLost: the coordinator is gone.
        """
        patience = time.monotonic() + REFUSED_LIMIT_S
        self._send_join_request()
        while True:
            check()
            message = self.receive(RETRY_S)
            verb = verb_of(message)
            if message is None:
                continue
            if verb == "admitted":
                self._epoch = str(message["epoch"])
            elif verb == "waiting":
                self._report_wait(f"waits for {message['whom']}")
            elif verb == "refused":
                if not message["later"] or time.monotonic() > patience:
                    raise ConfigError(
                        f"{name_of(self._address)} does not let this machine in: {message['sentence']}"
                    )
                self._pause(check)
                self._send_join_request()
            elif verb == "round":
                return self._round(message)
            elif verb == "over":
                return launch_ended_of(message)

    def rejoin(self, check: Callable[[], None]) -> None:
        """Connect anew to a coordinator that was out of reach. Raises CoordinatorLost when it stays away."""
        deadline = time.monotonic() + REJOIN_LIMIT_S
        while True:
            check()
            try:
                self._client = Client(self._address, self._secret, CONNECT_S)
            except ControlError:
                if time.monotonic() > deadline:
                    raise CoordinatorLost(
                        f"the machine that hosts this launch, {name_of(self._address)}, could not be reached "
                        f"again within {REJOIN_LIMIT_S:.0f} s. Read its output."
                    ) from None
                self._pause(check)
                continue
            self._last_message = self._clock()
            return

    def receive(self, timeout_s: float) -> dict[str, object] | None:
        """Return the next message that is not a heartbeat; None if there is none in time. Raises CoordinatorLost."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                message = self._client.receive(max(deadline - time.monotonic(), 0))
            except ControlError:
                raise CoordinatorLost(
                    f"the machine that hosts this launch, {name_of(self._address)}, is gone."
                ) from None
            now = self._clock()
            if message is not None:
                self._last_message = now
                if verb_of(message) != "heartbeat":
                    return message
            # Each of our heartbeats is answered, so that a coordinator which says nothing is gone or out of reach.
            elif now - self._last_message > self._heartbeat_limit_s:
                self._client.close()
                raise CoordinatorLost(
                    f"the machine that hosts this launch, {name_of(self._address)}, was silent for "
                    f"{self._heartbeat_limit_s:.0f} s. Look at that machine and the network to it, or raise "
                    "heartbeat_timeout in rdzv_conf."
                )
            if time.monotonic() >= deadline:
                return None

    def tell(self, verb: str, **facts: object) -> None:
        """Tell the coordinator something. If it is gone, the next ``receive`` says so."""
        with suppress(ControlError):
            self._client.send({"kind": f"rendezvous.{verb}", **facts})

    def close(self) -> None:
        """Leave."""
        self._ended.set()
        self._close_listener()
        self._client.close()

    # -- connecting ----------------------------------------------------------------------------------

    def _connected(self, limit_s: float) -> Client:
        """Connect, and wait for a coordinator that does not listen yet, but not for one without the secret."""
        started = time.monotonic()
        while True:
            try:
                return Client(self._address, self._secret, CONNECT_S)
            except SilentError as error:
                reason = error
            except ControlError as error:
                raise ConfigError(
                    f"{error} Every machine reads the secret from --secret-file or LOCKSTEP_SECRET; "
                    "main_process_ip and main_process_port are the address of the machine that hosts the launch."
                ) from None
            waited_s = time.monotonic() - started
            if waited_s > limit_s:
                raise ConfigError(
                    f"nothing answers at {name_of(self._address)} after {limit_s:.0f} s. {reason} Start the machine "
                    f"that hosts the launch (machine_rank 0), or correct main_process_ip and main_process_port."
                )
            if waited_s > SAY_WAITING_AFTER_S:
                self._report_wait("waits for the machine that hosts the launch")
            time.sleep(RETRY_S)

    def _report_wait(self, what: str) -> None:
        if not self._has_reported_wait:
            self._has_reported_wait = True
            rank = "" if self._identity.rank is None else f" {self._identity.rank}"
            self._say(f"lockstep: machine{rank} ({platform.node()}) {what} at {name_of(self._address)}.")

    def _send_join_request(self) -> None:
        self._close_listener()
        identity = self._identity
        # Bound before it is offered: where this machine comes to host the round, its store gets this very socket.
        self._listener = listening_socket(identity.own_address, identity.store_port)
        self._last_message = self._clock()
        self.tell(
            "join",
            machine=self._machine,
            name=platform.node(),
            run=identity.run,
            nproc=identity.nproc,
            rank=identity.rank,
            address=identity.own_address,
            port=self._listener.getsockname()[1],
            epoch=self._epoch,
        )

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _round(self, message: JsonObject) -> Round:
        listener = self._listener if message["group_rank"] == 0 else None
        # The first machine alone hosts the store: the others free the port that they have offered.
        if listener is None:
            self._close_listener()
        self._listener = None
        names = ("number", "group_rank", "base_rank", "machines", "world_size", "address", "port")
        return Round(**{name: message[name] for name in names}, listener=listener)

    def _pause(self, check: Callable[[], None]) -> None:
        check()
        time.sleep(2 * RETRY_S)

    def _heartbeat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            self.tell("heartbeat")


def verb_of(message: Mapping[str, object] | None) -> str:
    """Return the verb of a message: ``round`` of ``rendezvous.round``."""
    return "" if message is None else str(message.get("kind", "")).partition(".")[2]


def launch_ended_of(message: JsonObject) -> LaunchEnded:
    """Return the end of a launch, from its message."""
    return LaunchEnded(int(message["code"]), str(message["cause"]), str(message["note"]), message["rank"])
