"""A launch that runs, seen from another process: how it stands, what its ranks do; wishes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import lockstep
from lockstep.config.files import JsonObject
from lockstep.config.sources import SECRET_VARIABLE, inherited_environment, user_config_folder
from lockstep.control import Client, Secret, derived, read_secret
from lockstep.control.session import name_of
from lockstep.errors import ConfigError, ControlError
from lockstep.launch.running import running_launches, with_address

CONNECT_S = 5.0
ANSWER_S = 10.0


class JobConnection:
    """A connection to the coordinator of a launch.

    Raises:
        ConfigError: nothing listens there, it has another secret, or it is another version of Lockstep.
    """

    def __init__(self, address: tuple[str, int], secret: Secret) -> None:
        self.address = address
        self._others: list[dict[str, object]] = []
        try:
            self._client = Client(address, secret, CONNECT_S)
        except ControlError as error:
            raise ConfigError(str(error)) from None

    def look(self) -> JsonObject:
        """Return how the launch stands now, see ``viewers.py``.

        Raises:
            ConfigError: it does not tell, with the reason.
            ControlError: the launch has ended.
        """
        self._send("look", version=lockstep.__version__)
        deadline = time.monotonic() + ANSWER_S
        while True:
            message = self._receive(max(deadline - time.monotonic(), 0.0))
            kind = None if message is None else message.get("kind")
            if kind == "top.view":
                assert message is not None
                return message
            if kind == "top.refused" and message is not None:
                raise ConfigError(
                    f"{name_of(self.address)} refused `lockstep top`: {str(message.get('sentence'))[:300]}. Use "
                    "the same version of Lockstep, or try again later."
                )
            if message is None:
                raise ControlError(
                    f"{name_of(self.address)} does not answer within {ANSWER_S:.0f} s. Check that the launch still "
                    "runs there."
                )
            self._others.append(message)

    def ask(self, verb: str) -> None:
        """Ask for ``stacks`` or to ``stop``; the answer is among the ``news``. Raises ControlError."""
        self._send(verb)

    def news(self, timeout_s: float) -> list[dict[str, object]]:
        """Return what has come since: messages ``top.said`` and ``top.stack``; waits so long for the first. Raises
        ControlError."""
        if not self._others:
            message = self._receive(timeout_s)
            if message is not None:
                self._others.append(message)
        found, self._others = self._others, []
        return found

    def close(self) -> None:
        """Leave. The launch goes on."""
        self._client.close()

    def _send(self, verb: str, **values: object) -> None:
        self._client.send({"kind": f"top.{verb}", **values})

    def _receive(self, timeout_s: float) -> dict[str, object] | None:
        return self._client.receive(timeout_s)


def connect_to(address: tuple[str, int], secret_file: str | None) -> JobConnection:
    """Connect to a launch by its address.

    Its secret is that of ``secret_file``, of a launch of this user on this machine, of LOCKSTEP_SECRET, or the user's
    own, in this order.

    Raises:
        ConfigError: no secret is known; or see ``JobConnection``.
    """
    if secret_file is not None:
        return JobConnection(address, derived(read_secret(Path(secret_file).expanduser()), "launch"))
    here = with_address(address)
    if here is not None:
        return JobConnection(address, here.secret)
    given = inherited_environment().get(SECRET_VARIABLE)
    if given:
        return JobConnection(address, derived(Secret.from_hex(given), "launch"))
    own = user_config_folder() / "secret"
    if not os.path.exists(own):
        raise ConfigError(
            f"The secret of {name_of(address)} is not known here, because no launch of this user on this machine "
            "listens there. Give the --secret-file of the launch, or run this command on one of its machines as "
            "the user who started it."
        )
    return JobConnection(address, derived(read_secret(own), "launch"))


def connect_here(launch_id: str = "") -> JobConnection | None:
    """Connect to the launch of this user on this machine with this id, or to the only one; None: there is none.

    Raises:
        ConfigError: there are several, and no id was given; or see ``JobConnection``.
    """
    found = [one for one in running_launches() if launch_id in ("", one.launch_id)]
    if len(found) > 1:
        listed = ", ".join(f"{name_of(one.address)} ({one.run})" for one in found[:8])
        raise ConfigError(f"{len(found)} launches run here: {listed}. Name one of these addresses.")
    return JobConnection(found[0].address, found[0].secret) if found else None
